"""The paper's systems on the virtual clock: their bytes against sums done by hand, and their order of events."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from zofftk.baselines.deepspeed import locked_bytes
from zofftk.baselines.gpt_2020 import GPT2020
from zofftk.baselines.ladder import ladder
from zofftk.baselines.machine import Line, Machine
from zofftk.baselines.prediction import OWN, SYSTEMS, predict
from zofftk.baselines.schedule import Buckets
from zofftk.baselines.workload import record_workload
from zofftk.baselines.zero_offload_2020 import NUM_TILES, TILE_NUMEL, ZeroOffload2020
from zofftk.device.base import COMPUTE, HOST, UP
from zofftk.device.clock import RaceError
from zofftk.gpt_config import GPTConfig
from zofftk.profile import load_profile
from zofftk.virtual.durations import Durations
from zofftk.virtual.events import Spent

V100 = load_profile("v100-dgx2")
SMALL = GPTConfig(layers=8, hidden=512, heads=8, vocab=2048, seq=128, recompute=True)
M = SMALL.num_params
TILES = NUM_TILES * 4 * TILE_NUMEL
BUCKETS = "gradient buckets"


def held(prediction):
    """Bytes on the device that are there all the time, but for buckets."""
    passing = {"activations", "gradients of the layer", "reserved", BUCKETS}
    return {name: n for name, n in prediction.device_bytes.items() if name not in passing}


def states(prediction):
    """Parameters, gradients and optimizer states on the device."""
    found = held(prediction)
    return sum(n for name, n in found.items() if "copy" not in name and "one piece" not in name)


def test_the_model_is_cut_as_megatron_cuts_it():
    whole, part = (GPT2020(SMALL, slices) for slices in (1, 4))
    count = [sum(param.numel() for param in model.parameters()) for model in (whole, part)]
    assert count[0] == M
    kept = SMALL.seq * 512 + 2 * 512 + 8 * (4 + 2) * 512  # positions, norms, biases of what is cut by rows
    assert count[1] == kept + (M - kept) / 4
    with pytest.raises(ValueError, match="slices must divide the 8 heads, got 3"):
        GPT2020(SMALL, 3)


def test_the_models_loss_is_the_mean_cross_entropy():
    torch.manual_seed(0)
    tiny = dataclasses.replace(SMALL, layers=1, hidden=32, heads=4, vocab=50, seq=6)
    model = GPT2020(tiny)
    ids, targets = torch.randint(50, (2, 2, 6)).unbind()
    kept = []
    model.norm.register_forward_hook(lambda module, inputs, out: kept.append(out))
    loss = model(ids, targets)
    (grad,) = torch.autograd.grad(loss, kept[0])
    hidden = kept[0].detach().requires_grad_()
    plain = F.cross_entropy(F.linear(hidden, model.tokens.weight).flatten(0, 1), targets.flatten())
    (expected,) = torch.autograd.grad(plain, hidden)
    torch.testing.assert_close(loss.detach(), plain.detach())
    torch.testing.assert_close(grad, expected)


def test_models_of_other_depth_share_a_recording():
    few, many = (record_workload(dataclasses.replace(SMALL, layers=layers), 1, 1, V100) for layers in (8, 20))
    assert few.few is many.few
    assert many.num_params == dataclasses.replace(SMALL, layers=20).num_params
    with pytest.raises(ValueError, match="expected a model of 6 layers or more, got 5"):
        record_workload(dataclasses.replace(SMALL, layers=5), 1, 1, V100)


def test_what_a_rank_holds_of_the_states():
    assert states(predict("ddp", SMALL, V100)) == 16 * M
    assert states(predict("ddp", SMALL, V100, ranks=4)) == 16 * M
    assert states(predict("megatron", SMALL, V100)) == 16 * M
    sliced = record_workload(SMALL, 1, 4, V100).num_params
    assert states(predict("megatron", SMALL, V100, slices=4)) == 16 * sliced
    for ranks in (1, 4, 16):
        assert states(predict("zero2", SMALL, V100, ranks=ranks)) == pytest.approx((2 + 14 / ranks) * M, rel=1e-5)
        shards = 16 / ranks * M + 2 * (SMALL.vocab + SMALL.seq + 2) * SMALL.hidden  # and what is in no layer
        of_zero3 = predict("zero3", SMALL, V100, ranks=ranks).device_bytes
        lasting = sum(n for name, n in of_zero3.items() if "shard" in name or name == "16-bit parameters in no layer")
        assert lasting == pytest.approx(shards, rel=1e-4)
    for system in ("zero-offload-2020", "deepspeed"):
        assert predict(system, SMALL, V100, ranks=4).device_bytes["16-bit parameters"] == pytest.approx(2 * M, rel=1e-5)
    assert predict("swapadvisor", SMALL, V100).host_bytes["16-bit gradients"] == 2 * M


def test_what_a_rank_holds_on_its_host():
    for ranks in (1, 4):
        released = sum(predict("zero-offload-2020", SMALL, V100, ranks=ranks).host_bytes.values())
        assert released - TILES == pytest.approx(18 * M / ranks, rel=1e-5)  # of which 2 are sums of micro-batches
    today = predict("deepspeed", SMALL, V100).host_bytes
    assert sum(today.values()) == 8 * M + 2 * locked_bytes(4 * M) + 2 * locked_bytes(2 * M)
    assert (locked_bytes(1 << 20), locked_bytes((1 << 20) + 1)) == (1 << 20, 1 << 21)
    assert sum(predict("l2l", SMALL, V100).host_bytes.values()) == 16 * M
    assert sum(predict("ddp", SMALL, V100).host_bytes.values()) == 0


@pytest.mark.parametrize(
    ("system", "micro_batches", "down", "up"),
    [
        ("ddp", 1, 0, 0),
        ("zero2", 2, 0, 0),
        ("l2l", 1, 12, 16),  # 28 in all, as the paper counts
        ("l2l", 3, 12 + 2 * 2, 16 + 2 * (4 + 2)),
        ("swapadvisor", 5, 5 * 14, 5 * 14),  # its plan is of one micro-batch
        ("zero-offload-2020", 1, 4, 4),
        ("zero-offload-2020", 2, 2 + 4, 2 + 4),
        ("zero-offload-2020", 4, 3 * 2 + 4, 3 * 2 + 4),
        ("zero-offload-2020", 7, 6 * 2 + 4, 6 * 2 + 4),  # more than are run
        ("deepspeed", 1, 4, 2),
        ("deepspeed", 4, 3 * 2 + 4, 3 * 2 + 2),
        (OWN, 1, 2, 2),  # the paper's minimum
        (OWN, 3, 3 * 2, 2),
    ],
)
def test_bytes_on_the_link(system, micro_batches, down, up):
    predicted = predict(system, SMALL, V100, ranks=1 if system == OWN else 4, micro_batches=micro_batches)
    on_link = [nbytes / M * predicted.ranks for nbytes in predicted.link_bytes]
    assert on_link == pytest.approx([down, up], rel=2e-3, abs=2e-3)


def test_bytes_between_ranks():
    """A sum that all receive goes round twice; ZeRO-3 gathers parameters twice and scatters gradients once."""
    for system, times in (("ddp", 2), ("megatron", 2), ("zero2", 2), ("zero-offload-2020", 2), ("deepspeed", 2)):
        between = predict(system, SMALL, V100, ranks=4).step.bytes_between
        assert between == pytest.approx(times * 2 * M * 3 / 4, rel=1e-3), system
    in_layers = SMALL.layers * (12 * 512**2 + 13 * 512)
    between = predict("zero3", SMALL, V100, ranks=4).step.bytes_between
    rest = M - in_layers  # gathered once, after its update
    at_turn = in_layers / SMALL.layers  # the last layer stays for its backward
    assert between == pytest.approx((3 * in_layers + 2 * rest - at_turn) * 2 * 3 / 4, rel=1e-3)


@pytest.mark.parametrize("system", [*SYSTEMS, OWN])
@pytest.mark.parametrize("ranks", [1, 4])
def test_no_system_is_faster_than_its_model_and_its_link(system, ranks):
    predicted = predict(system, SMALL, V100, ranks=ranks, micro_batches=2)
    workload = record_workload(SMALL, 1, 1, V100)
    model = sum(e.ns for _, events in workload.events() for e in events if isinstance(e, Spent))
    assert predicted.step.ns >= 2 * model
    assert predicted.step.flops == 2 * sum(
        e.flops for _, events in workload.events() for e in events if isinstance(e, Spent)
    )
    link = max(predicted.link_bytes) / V100.link.down_gb_s
    assert predicted.step.ns >= link * 0.999
    peak = V100.gpu.peak_16bit_tflops * V100.gpu.max_efficiency
    assert 0 < predicted.tflops < peak


def test_more_micro_batches_than_are_run_take_as_long_as_if_they_were(monkeypatch):
    for system in ("ddp", "l2l", "zero-offload-2020", "deepspeed"):
        short = predict(system, SMALL, V100, ranks=2, micro_batches=9)
        monkeypatch.setattr("zofftk.baselines.prediction.FEW", 9)
        full = predict(system, SMALL, V100, ranks=2, micro_batches=9)
        monkeypatch.undo()
        assert short.step.ns == pytest.approx(full.step.ns, rel=1e-3), system
        assert short.link_bytes == full.link_bytes


def spans_of(kind, micro_batches=1, **options):
    machine = Machine(Durations(V100, options.pop("ranks", 1)), keep_spans=True)
    schedule = kind(machine, record_workload(SMALL, 1, 1, V100), **options)
    for _ in range(2):
        for number in range(micro_batches):
            schedule.micro_batch(is_first=number == 0, is_last=number == micro_batches - 1)
        schedule.step()
    machine.device.collect_spans()
    return list(machine.device.trace.spans)


def test_a_tile_goes_up_while_the_next_is_updated():
    class SmallTiles(ZeroOffload2020):
        tile_numel = M // 4 + 1

    spans = spans_of(SmallTiles)
    updates = [span for span in spans if (span.lane, span.label) == (HOST, "Adam")]
    copies = [span for span in spans if (span.lane, span.label) == (UP, "parameters up")]
    assert len(updates) == len(copies) == 8
    for number in range(3):
        assert copies[number].start_s >= updates[number].stop_s
        assert copies[number].start_s < updates[number + 1].stop_s
    forward = [span for span in spans if span.label == "forward"]
    assert forward[1].start_s >= copies[3].stop_s


def test_a_late_update_runs_beside_the_next_forward():
    spans = spans_of(ZeroOffload2020, delayed=True)
    first = next(span for span in spans if (span.lane, span.label) == (HOST, "Adam"))
    later = [span for span in spans if span.lane == COMPUTE and span.label == "forward"][1]
    assert later.start_s < first.stop_s
    up = next(span for span in spans if span.lane == UP)
    assert up.start_s >= first.stop_s
    assert up.start_s >= max(span.stop_s for span in spans if span.label == "backward")


def test_ddp_reduces_behind_backward_and_megatron_after_it():
    for name, is_behind in (("ddp", True), ("megatron", False)):
        spans = spans_of(SYSTEMS[name], ranks=4)
        adam = next(span for span in spans if span.lane == COMPUTE and span.label == "Adam")
        end = max(span.stop_s for span in spans if span.label == "backward" and span.start_s < adam.start_s)
        reduced = [span for span in spans if span.label.startswith("all-reduce")]
        assert (reduced[0].start_s < end) is is_behind
        assert adam.start_s >= [span.stop_s for span in reduced if span.start_s < adam.start_s][-1]


def test_a_missing_wait_is_found():
    machine = Machine(Durations(V100))
    on_host, on_gpu = machine.buffer("host", "host", 100), machine.buffer("gpu", "device", 100)
    machine.on_host("write", on_host, ())
    with pytest.raises(RaceError, match="without having waited"):
        machine.copy(UP, "read", on_gpu, on_host, ())


def test_the_line_knows_what_was_there_at_its_peak():
    line = Line()
    for what, nbytes in (("a", 1000), ("b", 100), ("a", -1000), ("c", 512)):
        line.change(what, nbytes)
    assert line.peak == {"a": 1024, "b": 512}


def test_a_bucket_is_full_when_it_is():
    buckets = Buckets(10)
    assert [buckets.add(n) for n in (4, 5, 1, 30, 2)] == [0, 0, 10, 30, 0]
    assert (buckets.take(), buckets.take()) == (2, 0)


def test_the_update_on_the_gpu_takes_what_the_paper_measured():
    """Its Table 4: 0.10 s for a billion parameters, 1.00 s for ten; 0.64 s for four is the one far from a line."""
    machine = Machine(Durations(V100))
    for numel, seconds in ((1e9, 0.10), (2e9, 0.26), (8e9, 0.87), (10e9, 1.00)):
        before = machine.device.now_ns(COMPUTE)
        machine.move("Adam", 80 * numel)
        assert (machine.device.now_ns(COMPUTE) - before) / 1e9 == pytest.approx(seconds, rel=0.2)


def test_the_ladder_has_what_the_paper_prints():
    sizes = ladder()
    assert list(sizes)[:8] == [1, 1.4, 2, 3.9, 4, 4.5, 6, 8]
    for size, config in sizes.items():
        assert config.num_params / 1e9 == pytest.approx(size, rel=0.12), size
    params = [config.num_params for config in sizes.values()]
    assert params == sorted(params)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"system": "zero-1"}, "system must be one of ddp"),
        ({"system": "ddp", "slices": 2}, "ddp does not cut layers"),
        ({"system": "ddp", "micro_batches": 0}, "micro_batches must be 1 or more, got 0"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        predict(config=SMALL, profile=V100, **arguments)
