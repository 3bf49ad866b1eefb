"""A few layers, continued, are the whole model run in full: event by event, in time, memory and traffic."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import zofftk
from zofftk.gpt import GPT
from zofftk.gpt_config import GPTConfig
from zofftk.profile import load_profile
from zofftk.virtual.dry_run import dry_run
from zofftk.virtual.durations import Durations
from zofftk.virtual.rehearsal import Rehearsal

V100 = load_profile("v100-dgx2")
SHALLOW = GPTConfig(layers=6, hidden=64, heads=4, vocab=2048, seq=32)


def loss_of(config, batch=4):
    def loss(model):
        ids = torch.zeros(batch, config.seq, dtype=torch.long)
        return model(ids, ids)

    return loss


def rehearse(config, *, in_full, durations=None, build=None, loss=None):
    build, loss = build or (lambda: GPT(config)), loss or loss_of(config)
    durations = durations or Durations(V100)
    return Rehearsal(build, loss, durations, dtype=torch.bfloat16, in_full=in_full, keep_spans=True)


def spans(device):
    device.collect_spans()
    return list(device.trace.spans)


def place_of_peak(memory):
    """As a share of the line."""
    live, heights = 0, []
    for delta in memory.deltas:
        live += delta
        heights.append(live)
    return heights.index(max(heights)) / len(heights)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("layers", [6, 7, 20])
def test_gradients_kept(recompute, layers):
    config = dataclasses.replace(SHALLOW, layers=layers, recompute=recompute)
    stretched, full = (rehearse(config, in_full=in_full) for in_full in (False, True))
    assert (stretched.is_stretched, full.is_stretched) == (True, False)
    for _ in range(2):  # the second accumulates
        for each in (stretched, full):
            each.program.micro_batch()
        assert stretched.memory.deltas == full.memory.deltas
        assert stretched.memory.peak() == full.memory.peak()
        assert stretched.counts() == full.counts()
    assert spans(stretched.device) == spans(full.device)


OPTIONS = {
    "synchronous": {},
    "delayed": {"update": "delayed"},
    "inside backward": {"update": "delayed", "backwards_per_step": 1},
    "overlapped": {"overlap": True},
    "many backwards": {"backwards": 4},
    "fp32, clipped": {"dtype": torch.float32, "max_grad_norm": 1.0},
    "fp16, scaled": {"dtype": torch.float16, "loss_scale": 8.0},
    "ranks": {"ranks": 3},
    "ranks, delayed and overlapped": {"ranks": 16, "update": "delayed", "overlap": True, "backwards": 2},
    "Lion": {"optimizer": zofftk.OffloadLion},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_freed(options):
    config = dataclasses.replace(SHALLOW, layers=9, recompute=True)
    options = {"bucket_bytes": 128 * 1024, "keep_spans": True, **options}
    stretched, full = (
        dry_run(lambda: GPT(config), loss_of(config), V100, in_full=in_full, **options) for in_full in (False, True)
    )
    assert (stretched.is_stretched, full.is_stretched) == (True, False)
    assert list(stretched.trace.spans) == list(full.trace.spans)
    for field in dataclasses.fields(full):
        if field.name not in ("trace", "is_stretched"):
            assert getattr(stretched, field.name) == getattr(full, field.name), field.name


def test_the_peak_moves_with_the_layers_where_gradients_are_kept():
    """From the logits to the last of the gradients."""
    places = []
    for layers in (6, 60):
        rehearsal = rehearse(dataclasses.replace(SHALLOW, layers=layers, recompute=True), in_full=False)
        rehearsal.program.micro_batch()
        places.append(place_of_peak(rehearsal.memory))
    assert places[0] < 0.4
    assert places[1] > 0.9


@pytest.mark.parametrize("in_full", [False, True])
def test_the_peak_moves_with_the_layers_where_gradients_are_freed(in_full):
    """Few tokens: from the embedding's gradient to the activations, where backward begins."""
    places = []
    for layers in (6, 60):
        config = dataclasses.replace(SHALLOW, layers=layers, seq=8)
        rehearsal = rehearse(config, in_full=in_full, loss=loss_of(config, batch=1))
        for param in rehearsal.program.params.values():
            param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
        rehearsal.program.micro_batch()
        places.append(place_of_peak(rehearsal.memory))
    assert places[0] > 0.9
    assert 0.2 < places[1] < 0.6


class Unlike(nn.Module):
    """Layers that look alike and do not do the same."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(9))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x) if number != 2 else layer(x).relu()
        return x.sum()


class Counted(nn.Module):
    """A model that knows how many layers it has."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(9))

    def forward(self, x):
        for number in range(9):
            x = self.layers[number](x)
        return x.sum()


@pytest.mark.parametrize("build", [Unlike, Counted])
def test_layers_that_do_not_repeat_are_all_run(build):
    rehearsal = rehearse(None, in_full=False, build=build, loss=lambda model: model(torch.zeros(4, 32).bfloat16()))
    assert not rehearsal.is_stretched
    rehearsal.program.micro_batch()
    assert rehearsal.counts().flops == 2 * 4 * 32 * 32 * 9 * 3 - 2 * 4 * 32 * 32  # the input has no gradient


def test_flops_are_those_of_the_formula():
    config = GPTConfig(layers=8, hidden=256, heads=4, vocab=1024, seq=128, recompute=True)
    result = dry_run(lambda: GPT(config), loss_of(config), V100)
    # A token's products: 24 h^2 in a layer, run again but for the last one (8 h^2), and twice as much in backward;
    # attention, whose backward computes its scores once more; the head, which is not run again.
    layer, attention, head = 4 * 24 * 256**2 - 8 * 256**2, (1 + 1 + 2.5) * 4 * 128 * 256, 6 * 1024 * 256
    assert result.step.flops == 4 * 128 * (8 * (layer + attention) + head)


def test_bytes_are_those_of_the_design():
    config = GPTConfig(layers=8, hidden=512, heads=4, vocab=1024, seq=64, recompute=True)
    one = dry_run(lambda: GPT(config), loss_of(config), V100)
    n = one.num_params
    assert n == config.num_params
    assert one.host_bytes == pytest.approx(14 * n, rel=0.01)
    assert one.locked_bytes == pytest.approx(2 * n, rel=0.01)
    assert one.step.bytes_down == pytest.approx(2 * n, rel=0.01)
    assert one.step.bytes_up == pytest.approx(2 * n, rel=0.001)
    assert one.device.parameters == 2 * n
    four = dry_run(lambda: GPT(config), loss_of(config), V100, ranks=4)
    assert four.host_bytes == pytest.approx(14 * n / 4, rel=0.02)
    assert four.step.bytes_up == pytest.approx(2 * n / 4, rel=0.02)
    assert four.step.bytes_between == pytest.approx(2 * 2 * n * 3 / 4, rel=0.02)


@pytest.mark.slow
def test_the_paper_s_largest_model_on_one_gpu():
    """13 billion parameters, micro-batch 4, sequence 1024."""
    config = GPTConfig(layers=65, hidden=4096, heads=32, vocab=50257, seq=1024, recompute=True)
    result = dry_run(lambda: GPT(config), loss_of(config), V100)
    assert result.is_stretched
    assert (result.device.parameters + result.device.activations) / 2**30 == pytest.approx(29.2, abs=0.1)
    assert result.fits_device
    assert result.fits_host


def test_what_does_not_fit():
    gpu, host = V100.gpu, V100.host
    config = dataclasses.replace(SHALLOW, hidden=512)
    result = dry_run(lambda: GPT(config), loss_of(config), V100)
    small_gib, host_gib = result.device.total / 2**30, result.host_bytes / 2**30
    for fits, share in [(True, 1.01), (False, 0.99)]:
        profile = dataclasses.replace(V100, gpu=dataclasses.replace(gpu, memory_gib=share * small_gib))
        assert dry_run(lambda: GPT(config), loss_of(config), profile).fits_device is fits
        profile = dataclasses.replace(V100, host=dataclasses.replace(host, memory_gib=share * host_gib))
        assert dry_run(lambda: GPT(config), loss_of(config), profile).fits_host is fits


def test_a_late_update_is_hidden_and_an_early_one_is_not():
    config = GPTConfig(layers=12, hidden=1024, heads=16, vocab=1024, seq=128, recompute=True)
    late, early = (
        dry_run(lambda: GPT(config), loss_of(config), V100, update=update) for update in ("delayed", "synchronous")
    )
    assert early.step.busy_ns == late.step.busy_ns
    compute, host = early.step.busy_ns["compute"], early.step.busy_ns["host"]
    assert early.step.ns > compute + host
    assert max(compute, host) < late.step.ns < compute + host


@pytest.mark.parametrize("wrong", [{"ranks": 0}, {"backwards": 0}])
def test_numbers_below_1_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be 1 or more, got 0"):
        dry_run(lambda: GPT(SHALLOW), loss_of(SHALLOW), V100, **wrong)


def test_what_builds_no_module_is_refused():
    with pytest.raises(TypeError, match="expected a function that builds a torch module, it returned int"):
        dry_run(lambda: 3, loss_of(SHALLOW), V100)
