"""A plan says what dry runs say: what fits at the boundary, where bytes and time go, and which setting is best."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from rich.console import Console
from torch import nn

from zofftk.errors import InputError
from zofftk.gpt import GPT
from zofftk.gpt_config import GPTConfig
from zofftk.plan import Plan, Setting, Source, plan
from zofftk.plan.memory import ACCUMULATORS, GRADIENTS, LATE, LINK, MASTERS
from zofftk.plan.nearest import can_share
from zofftk.plan.report import print_plan
from zofftk.plan.search import largest_fitting
from zofftk.plan.setting import POLICIES
from zofftk.plan.sources import preset_source
from zofftk.plan.step_parts import divide
from zofftk.plan.trials import SHALLOW, Trials
from zofftk.profile import load_profile
from zofftk.trace import Span
from zofftk.virtual.dry_run import dry_run

GIB = 1 << 30
V100 = load_profile("v100-dgx2")
CONFIG = GPTConfig(layers=7, hidden=128, heads=4, vocab=1024, seq=64)
SETTING = Setting(micro_batch=4, seq=64)


def small_source(config=CONFIG, **more):
    def build(layers, setting, mesh):
        layers = layers or config.layers
        return GPT(dataclasses.replace(config, layers=layers, recompute=setting.recompute))

    def loss(model, setting):
        ids = torch.zeros(setting.micro_batch, setting.seq, dtype=torch.long)
        return model(ids, ids)

    values = {"name": "small", "layers": config.layers, "can_recompute": True, "default": SETTING, **more}
    return Source(build=build, loss=loss, **values)


def machine(*, device_bytes=None, host_bytes=None, **gpu):
    """A V100 whose memory is as large as is said, in a profile's unit."""
    host = V100.host
    if device_bytes is not None:
        gpu["memory_gib"] = device_bytes / GIB
    if host_bytes is not None:
        host = dataclasses.replace(host, memory_gib=host_bytes / GIB)
    return dataclasses.replace(V100, gpu=dataclasses.replace(V100.gpu, reserved_gib=0.001, **gpu), host=host)


def run_dry(setting, profile, config=CONFIG):
    config = dataclasses.replace(config, recompute=setting.recompute)

    def loss(model):
        ids = torch.zeros(setting.micro_batch, setting.seq, dtype=torch.long)
        return model(ids, ids)

    options = POLICIES[setting.policy] | {"bucket_bytes": setting.bucket_bytes}
    counts = {"ranks": setting.ranks, "backwards": setting.backwards}
    return dry_run(lambda: GPT(config), loss, profile, **counts, **options)


@pytest.fixture(scope="module")
def answer():
    """On a device that has room for a few micro-batches."""
    needs = Trials(small_source(), machine()).memory(SETTING).device.total_bytes
    return plan(small_source(), machine(device_bytes=2.5 * needs), SETTING)


def test_the_largest_micro_batch_fits_and_one_more_does_not(answer):
    profile = machine(device_bytes=answer.memory.device.capacity_bytes)
    largest = answer.largest_micro_batch
    assert largest > SETTING.micro_batch
    for micro_batch, fits in ((largest, True), (largest + 1, False)):
        assert run_dry(dataclasses.replace(SETTING, micro_batch=micro_batch), profile).fits_device is fits


def test_the_largest_model_fits_and_one_layer_more_does_not(answer):
    profile = machine(device_bytes=answer.memory.device.capacity_bytes)
    largest = answer.largest_layers
    assert largest > CONFIG.layers
    assert answer.largest_params == dataclasses.replace(CONFIG, layers=largest).num_params
    for layers, fits in ((largest, True), (largest + 1, False)):
        config = dataclasses.replace(CONFIG, layers=layers)
        assert run_dry(SETTING, profile, config).fits_device is fits


def test_the_host_can_be_what_ends_it():
    needs = Trials(small_source(), machine()).memory(SETTING).host.total_bytes
    profile = machine(host_bytes=1.7 * needs)
    found = plan(small_source(), profile, SETTING)
    largest = found.largest_layers
    trials = Trials(small_source(), profile)
    assert [trials.memory(SETTING, layers).host.fits for layers in (largest, largest + 1)] == [True, False]
    assert trials.memory(SETTING, largest + 1).device.fits


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backwards", [1, 2])
def test_the_bytes_are_those_of_a_dry_run(policy, backwards):
    if policy == "delayed, inside backward" and backwards > 1:
        pytest.skip("it is for one backward a step")
    setting = dataclasses.replace(SETTING, policy=policy, backwards=backwards, bucket_bytes=64 * 1024)
    memory, whole = Trials(small_source(), V100).memory(setting), run_dry(setting, V100)
    assert memory.device.total_bytes == whole.device.total
    saving = memory.host.items["largest tensor, while a checkpoint is saved"]
    assert memory.host.total_bytes - saving == whole.host_bytes
    assert saving == 2 * CONFIG.vocab * CONFIG.hidden
    assert memory.host.locked_bytes == whole.locked_bytes
    assert memory.num_params == CONFIG.num_params
    n = CONFIG.num_params
    assert memory.host.items[MASTERS] == pytest.approx(4 * n, rel=0.01)
    assert memory.host.items[LINK] == pytest.approx(2 * n, rel=0.01)
    assert memory.host.items.get(LATE, 0) == (memory.host.items[LINK] if "delayed" in policy else 0)
    assert memory.host.items.get(ACCUMULATORS, 0) == pytest.approx(4 * n * (backwards - 1), rel=0.01)


def test_a_host_has_all_its_devices():
    setting = dataclasses.replace(SETTING, ranks=4)
    memory, whole = Trials(small_source(), V100).memory(setting), run_dry(setting, V100)
    saving = memory.host.items["largest tensor, while a checkpoint is saved"]
    assert memory.host.total_bytes - saving == 4 * whole.host_bytes
    assert memory.device.total_bytes == whole.device.total


@pytest.mark.parametrize(
    ("policy", "more"),
    [
        ("synchronous", {}),
        ("synchronous", {"backwards": 5}),
        ("delayed, inside backward", {}),
        ("delayed, behind forward", {"ranks": 2, "backwards": 2}),
    ],
)
def test_the_step_is_that_of_a_dry_run_and_its_parts_add_up(policy, more):
    setting = dataclasses.replace(SETTING, policy=policy, bucket_bytes=64 * 1024, **more)
    step, whole = Trials(small_source(), V100).step(setting), run_dry(setting, V100)
    assert step.step_ns == whole.step.ns
    assert (step.flops, step.bytes_down, step.bytes_up) == (
        whole.step.flops,
        whole.step.bytes_down,
        whole.step.bytes_up,
    )
    busy = whole.step.busy_ns
    stages = step.stages
    assert stages["gradients down"].total_ns == pytest.approx(busy["down"], rel=0.01)
    assert stages["values up"].total_ns == pytest.approx(busy["up"], rel=0.01)
    on_host = stages["update"].total_ns + stages["statistics and sums"].total_ns
    assert on_host == pytest.approx(busy["host"], rel=0.01)
    assert stages["forward"].hidden_ns == stages["backward"].hidden_ns == 0
    assert stages["forward"].total_ns == step.parts["forward"]


@pytest.mark.parametrize(
    ("layers", "more", "allowed"),
    [
        (30, {}, 0),
        (30, {"micro_batch": 16, "recompute": False}, 0),  # the highest point is elsewhere than in a shallow one
        (12, {"backwards": 2, "policy": "delayed, behind forward"}, 256 * 1024),  # two buckets
        (25, {"ranks": 4}, 0.01),  # shards are whole blocks: of small ones, that is a lot
    ],
)
def test_a_deep_model_s_memory_comes_of_shallow_ones(layers, more, allowed):
    config = GPTConfig(layers=20, hidden=256, heads=4, vocab=512, seq=64)
    setting = Setting(**{"micro_batch": 2, "seq": 64, "recompute": True, "bucket_bytes": 128 * 1024} | more)
    trials = Trials(small_source(config), V100)
    memory = trials.memory(setting, layers)
    assert trials._is_deep(setting, layers)
    assert set(trials._shallows) == {(setting, few) for few in SHALLOW}
    whole = trials._rehearse_memory(setting, layers).memory
    assert memory.num_params == whole.num_params
    for found, expected in ((memory.device, whole.device), (memory.host, whole.host)):
        assert found.items.keys() - {GRADIENTS} == expected.items.keys() - {GRADIENTS}
        within = {"rel" if allowed < 1 else "abs": allowed}
        assert found.total_bytes == pytest.approx(expected.total_bytes, **within)
        assert found.locked_bytes == pytest.approx(expected.locked_bytes, **within)
        if not allowed:
            assert {name: nbytes for name, nbytes in found.items.items() if nbytes} == expected.items


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "delayed"])
def test_a_deep_model_s_step_comes_of_shallow_ones(policy):
    config = GPTConfig(layers=24, hidden=256, heads=4, vocab=512, seq=64, recompute=True)
    setting = Setting(micro_batch=2, seq=64, recompute=True, policy=policy, bucket_bytes=128 * 1024)
    trials = Trials(small_source(config), V100)
    assert trials._is_deep(setting, 24)
    step, whole = trials.step(setting), run_dry(setting, V100, config)
    assert step.step_ms == pytest.approx(whole.step_ms, rel=0.01)
    assert step.flops == whole.step.flops
    assert step.bytes_up == pytest.approx(whole.step.bytes_up, rel=1e-6)


def test_spans_are_divided_by_what_compute_does():
    spans = [
        Span("compute", "forward", 0, 4e-9),
        Span("down", "down: bucket 0", 3e-9, 7e-9),
        Span("host", "adam: bucket 0", 6e-9, 9e-9),
        Span("main", "wait for gradients", 4e-9, 9e-9),
    ]
    parts, stages = divide(spans, 0, 10, "adam")
    assert parts == {"forward": 4, "gradients down": 2, "update": 3, "latencies": 1}
    assert (stages["gradients down"].hidden_ns, stages["gradients down"].exposed_ns) == (1, 3)
    assert stages["update"].exposed_ns == 3


def test_what_fits_instead_really_fits():
    large = dataclasses.replace(SETTING, micro_batch=32)
    trials = Trials(small_source(), machine())
    recomputed = trials.memory(dataclasses.replace(large, recompute=True)).device.total_bytes
    one = trials.memory(dataclasses.replace(large, micro_batch=1)).device.total_bytes
    for capacity, recompute, micro_batch in ((recomputed, True, 32), (1.2 * one, None, None)):
        profile = machine(device_bytes=capacity)
        found = plan(small_source(), profile, large, searches=False)
        assert (found.fits, found.step) == (False, None)
        nearest = found.nearest
        assert nearest.memory.fits
        assert run_dry(nearest.setting, profile).fits_device
        assert run_dry(nearest.setting, profile).step_ms == pytest.approx(nearest.step_ms)
        if recompute is not None:
            assert (nearest.setting.recompute, nearest.setting.micro_batch) == (recompute, micro_batch)
        else:
            assert nearest.setting.micro_batch < 32 <= nearest.setting.sequences_per_step
            assert nearest.setting.sequences_per_step < 32 + nearest.setting.backwards


def test_where_the_device_is_the_host_their_memory_is_the_same():
    """Each alone would have room; together they have not."""
    alone = Trials(small_source(), machine()).memory(SETTING)
    device_bytes, host_bytes = alone.device.total_bytes, alone.host.total_bytes
    for share, fits in ((1.01, True), (0.99, False)):
        both = share * (device_bytes + host_bytes)
        profile = machine(device_bytes=both, host_bytes=both, is_host=True)
        memory = Trials(small_source(), profile).memory(SETTING)
        assert memory.device.fits
        assert memory.host.fits
        assert memory.fits is fits
        assert memory.host_total_bytes == device_bytes + host_bytes
    profile = machine(device_bytes=3 * both, host_bytes=3 * both, is_host=True)
    found = plan(small_source(), profile, SETTING)
    assert Plan.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    trials = Trials(small_source(), profile)
    for name, largest in (("micro_batch", found.largest_micro_batch), ("layers", found.largest_layers)):
        for number, fits in ((largest, True), (largest + 1, False)):
            if name == "layers":
                assert trials.memory(SETTING, number).fits is fits
            else:
                assert trials.memory(dataclasses.replace(SETTING, micro_batch=number)).fits is fits
    two = plan(small_source(), profile, dataclasses.replace(SETTING, ranks=2), searches=False)
    assert two.memory.devices_in_host == 2  # processes of the same machine, each with a part of it
    assert two.memory.device.capacity_bytes == pytest.approx(1.5 * both)


def test_what_fits_nowhere_is_said_to(capsys):
    profile = machine(device_bytes=0.001 * GIB + 100_000)  # beside what is reserved
    found = plan(small_source(), profile, dataclasses.replace(SETTING, micro_batch=1), searches=False)
    assert not found.fits
    assert found.nearest is None
    print_plan(found, Console(width=100))
    assert "nothing that was tried fits" in capsys.readouterr().out


def test_heads_are_not_cut():
    source = preset_source("tiny")  # of 4 heads
    assert [can_share(source, source.default, tp) for tp in (2, 4, 8)] == [True, True, False]


@pytest.mark.parametrize(
    "wrong",
    [{"micro_batch": 1.5}, {"ranks": True}, {"seq": "64"}, {"tp": None}, {"recompute": "no"}, {"bucket_bytes": 0}],
)
def test_numbers_of_a_setting_are_whole(wrong):
    with pytest.raises(InputError, match=f"{next(iter(wrong))}: expected"):
        Setting(**wrong)


def test_where_a_search_ends_is_no_finding(capsys):
    found = plan(small_source(), machine(), SETTING)
    assert found.largest_layers == 128
    print_plan(found, Console(width=100))
    assert "at least 128 layers" in capsys.readouterr().out


def test_a_model_that_fits_nowhere_becomes_a_smaller_one():
    trials = Trials(small_source(), machine())
    one = dataclasses.replace(SETTING, micro_batch=1)
    capacity = trials.memory(dataclasses.replace(one, recompute=True), 3).device.total_bytes
    profile = machine(device_bytes=capacity)
    found = plan(small_source(), profile, dataclasses.replace(one, recompute=True), searches=False)
    assert not found.fits
    assert found.nearest.layers == 3
    assert found.nearest.memory.fits


def test_the_best_is_the_quickest_by_its_own_dry_runs(answer):
    profile = machine(device_bytes=answer.memory.device.capacity_bytes)
    times = {}
    for each in answer.compared:
        whole = run_dry(each.setting, profile)
        times[each.setting] = whole.step_ms / each.setting.sequences_per_step
        assert each.step_ms == pytest.approx(whole.step_ms)
    assert len(times) >= 7
    fitting = [each.setting for each in answer.compared if each.fits]
    assert answer.best.setting == min(fitting, key=times.__getitem__)
    assert run_dry(answer.best.setting, profile).fits_device
    assert answer.best_reasons


def test_what_does_not_fit_is_not_best():
    """Without recomputation it would be quicker; a little more memory is what it lacks."""
    setting = dataclasses.replace(SETTING, recompute=True, micro_batch=16)
    trials = Trials(small_source(), machine())
    capacity = trials.memory(setting).device.total_bytes + 1024 * 1024
    found = plan(small_source(), machine(device_bytes=capacity), setting)
    assert found.best.setting.recompute
    assert trials.memory(found.best.setting).device.total_bytes <= capacity


def test_an_answer_goes_through_json(answer):
    text = json.dumps(answer.to_dict())
    assert Plan.from_dict(json.loads(text)) == answer
    values = json.loads(text)
    device = values["memory"]["device"]
    assert device["total_bytes"] == sum(device["items"].values())
    assert values["fits"] is True
    short = plan(small_source(), machine(device_bytes=4 << 20), SETTING, searches=False)
    assert Plan.from_dict(json.loads(json.dumps(short.to_dict()))) == short
    with pytest.raises(InputError, match="expected the schema 'zofftk plan 1', got None"):
        Plan.from_dict({})


@pytest.mark.parametrize("end", [0, 1, 5, 37, 1000])
@pytest.mark.parametrize("first", [1, 6, 64])
def test_the_search_ends_where_it_should_and_soon(end, first):
    """Free memory falls along a line that becomes steeper."""
    tried = []

    def free(n):
        tried.append(n)
        return min(end + 0.5 - n, 2 * (end + 3) - 2.5 * n + 0.2 * end) if end else -n

    expected = next((n for n in range(1200, 0, -1) if free(n) >= 0), None)
    tried.clear()
    assert largest_fitting(free, first) == expected
    assert len(tried) == len(set(tried)) <= 16


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_any_module_with_a_loss_of_its_own():
    source = Source.of_function(
        Perceptron, lambda model, setting: model(torch.zeros(setting.micro_batch, 64).bfloat16()).float().sum()
    )
    found = plan(source, "v100-dgx2", Setting(micro_batch=8))
    assert found.fits
    assert (found.layers, found.num_params) == (3, 6 * 65 * 64)
    recomputed = plan(source, V100, Setting(micro_batch=8, recompute=True), searches=False)
    assert recomputed.step.flops > found.step.flops


def test_late_values_go_up_in_the_order_in_which_they_are_awaited():
    """Behind forward that is the first layers' first, inside backward the last ones'; so the delay costs nothing."""
    config = dataclasses.replace(CONFIG, layers=12)
    trials = Trials(small_source(config), V100)
    order = {}
    for policy in ("synchronous, behind forward", "delayed, behind forward", "delayed, inside backward"):
        setting = dataclasses.replace(SETTING, policy=policy, bucket_bytes=128 * 1024)
        ups = [span.label for span in trials.timeline(setting).spans if span.label.startswith("up: bucket ")]
        numbers = [int(label.removeprefix("up: bucket ")) for label in ups]
        order[policy] = numbers[-len(set(numbers)) :]
    assert order["delayed, behind forward"] == order["synchronous, behind forward"] == sorted(numbers_of(order))[::-1]
    assert order["delayed, inside backward"] == sorted(numbers_of(order))
    late, own = (trials.step(dataclasses.replace(SETTING, policy=policy)).step_ns for policy in list(order)[1::-1])
    assert late <= own


def numbers_of(order):
    return set(order["synchronous, behind forward"])
