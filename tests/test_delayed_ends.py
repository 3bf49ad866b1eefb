"""The end of a delayed update: flushed, closed, dropped, switched off and on; and what is written while one is late."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import zofftk
from tests.compare import assert_same_bits
from tests.delayed_rule import HYPER, Pair, each_delay, each_mode, loss_of, mlp
from zofftk.device.emulated import EmulatedDevice

pytestmark = [
    pytest.mark.usefixtures("no_threads_left", "at_once"),
    pytest.mark.filterwarnings("ignore:a step was skipped"),
]
ROOT = Path(__file__).parent.parent
WARNING = "the last delayed update has not reached the parameters: call close() or flush() at the end\n"


# -- flush and close -----------------------------------------------------------------------------------------------


@each_mode
@each_delay
@pytest.mark.parametrize("slots", [1, 3])
def test_a_flush_at_any_time_and_again(mode, delay_after, slots):
    device = EmulatedDevice(delays=3, max_delay_ms=0.5, poison=True)  # values of the step before are still on their way
    pair = Pair(mlp, mode, delay_after=delay_after, staging_slots=slots, device=device)
    for steps in (0, 1, 2, 3, 1):
        pair.train(loss_of, steps)
        pair.flush()
        pair.flush()
    pair.assert_same()
    pair.close()


@each_mode
@pytest.mark.parametrize("kind", HYPER)
def test_close_flushes_and_leaves_the_states_readable(mode, kind):
    pair = Pair(mlp, mode, kind, delay_after=1)
    pair.train(loss_of, 5)
    pair.close()
    for p, q in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
        assert_same_bits(pair.opt.state[p]["master"].reshape(-1), pair.plain.state[q]["master"])
    saved = pair.opt.state_dict()
    assert "delayed" not in saved
    pair.opt.close()


@each_mode
@pytest.mark.parametrize("overflows", [False, True])
def test_close_after_a_backward_that_no_step_has_used(mode, overflows):
    pair = Pair(lambda: mlp(torch.float32), mode)
    pair.train(loss_of, 3)
    pair.backward(lambda model, step: loss_of(model, step) * (float("inf") if overflows else 1.0))
    pair.close()


ENDS = {
    "late": lambda opt: None,
    "flushed": lambda opt: opt.flush(),
    "switched": lambda opt: opt.switch_update("synchronous"),
    "closed": lambda opt: opt.close(),
}


@each_mode
@pytest.mark.parametrize("end", ENDS)
def test_dropping_it_without_close_says_so_once(mode, end, caplog):
    pair = Pair(mlp, mode)
    pair.train(loss_of, 2)
    ENDS[end](pair.opt)
    before = [p.detach().clone() for p in pair.model.parameters()]
    del pair.opt
    assert caplog.text.count(WARNING.strip()) == (1 if end == "late" else 0)
    for p, old in zip(pair.model.parameters(), before, strict=True):
        assert_same_bits(p.detach(), old)


def test_processes_that_end_while_an_update_is_late():
    """Exit code, and the warning once, unless there is nothing late any more."""
    expected = {
        "late, handed over": (0, WARNING),
        "late, exit 3": (3, WARNING),
        "late, exception": (1, WARNING),
        "late, closed": (0, ""),
        "late, forked child": (0, WARNING),
    }
    command = [sys.executable, "-W", "error", "-m", "tests.programs.endings", *expected]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    for name, code, seconds, errors in map(json.loads, result.stdout.splitlines()):
        assert (code, errors.count(WARNING)) == (expected[name][0], 1 if expected[name][1] else 0), (name, errors)
        assert errors == expected[name][1] or ("exception" in name and "ValueError: of the training loop\n" in errors)
        assert seconds < 10


# -- off and on ----------------------------------------------------------------------------------------------------


@each_mode
@pytest.mark.parametrize("first", ["delayed", "synchronous"])
def test_switching_off_and_on(mode, first):
    """Also right after an overflow, twice in a row, and to a delay that begins later."""
    pair = Pair(mlp, mode, update=first, max_grad_norm=0.5)
    pair.plain.delay_after = 0 if first == "delayed" else 1000

    def switch(update, delay_after=0):
        pair.opt.switch_update(update, delay_after)
        pair.plain.flush()
        pair.plain.delay_after = delay_after if update == "delayed" else 1000
        pair.assert_same_params()

    def train(steps, overflow_at=None):
        for step in range(steps):
            factor = float("inf") if step == overflow_at else 1.0
            pair.train(lambda model, step, factor=factor: loss_of(model, step) * factor, 1)

    train(3)
    switch("synchronous")
    train(2)
    switch("delayed")
    train(3, overflow_at=2)
    switch("synchronous")  # nothing is late
    switch("delayed", 10)  # two more synchronous steps
    train(4)
    switch("delayed", 0)
    train(1)
    switch("synchronous")
    train(2, overflow_at=1)
    switch("delayed")
    train(2, overflow_at=0)
    pair.assert_same()
    pair.close()


def test_a_switch_to_what_there_is_not():
    pair = Pair(mlp, {})
    pair.train(loss_of, 2)
    with pytest.raises(ValueError, match="update must be one of synchronous, delayed, got 'later'"):
        pair.opt.switch_update("later")
    with pytest.raises(ValueError, match="delay_after must be 0 or more steps, got -1"):
        pair.opt.switch_update("delayed", -1)
    pair.train(loss_of, 1)
    pair.assert_same()
    pair.close()
    with pytest.raises(RuntimeError, match="this optimizer is closed"):
        pair.opt.switch_update("synchronous")


# -- what is written while an update is late -----------------------------------------------------------------------


@each_mode
def test_writing_while_an_update_is_late_is_refused(mode):
    pair = Pair(lambda: mlp(torch.float32), mode)
    pair.train(loss_of, 2)
    model, opt = pair.model, pair.opt
    before = opt.state[model[0].weight]["master"].clone()
    with torch.no_grad():
        model[0].weight.fill_(5.0)
    loss_of(model, 2).backward()
    with pytest.raises(
        RuntimeError, match=r"parameter 0 of .* was written to while a delayed update .* call flush\(\)"
    ):
        opt.step()
    assert_same_bits(opt.state[model[0].weight]["master"], before)
    opt.refresh()  # b07: the written value stands
    opt.zero_grad()
    loss_of(model, 3).backward()
    opt.step()
    assert (model[0].weight == 5.0).all()
    opt.flush()
    assert (model[0].weight - 5.0).abs().max() < 0.1
    opt.close()


@each_mode
def test_a_refresh_loses_no_other_parameters_update(mode):
    pair = Pair(mlp, mode)
    pair.train(loss_of, 3)
    pair.opt.refresh()
    pair.train(loss_of, 2)
    pair.assert_same()
    pair.close()


def test_what_was_written_before_a_save_counts_after_it():
    """As after refresh(): the update of that parameter is dropped, that of the others comes."""
    pair = Pair(lambda: mlp(torch.float32), {})
    pair.train(loss_of, 2)
    with torch.no_grad():
        pair.model[0].weight.fill_(5.0)
    weights, saved = pair.model.state_dict(), pair.opt.state_dict()
    assert saved["delayed"]["late"] == [1, 2, 3, 4, 5]
    model, opt = pair.offloaded()
    model.load_state_dict(weights)
    opt.load_state_dict(saved)
    opt.flush()
    pair.plain.flush()
    for (name, p), q in zip(model.named_parameters(), pair.twin.parameters(), strict=True):
        assert_same_bits(p.detach(), q.detach() if name != "0.weight" else torch.full_like(q, 5.0))
    opt.close()
    pair.opt.refresh()
    pair.opt.close()


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_parameters_that_a_load_replaces(order):
    """`load_state_dict(assign=True)` puts other objects into the modules; what was late comes to those."""
    pair = Pair(mlp, {})
    pair.train(loss_of, 3)
    weights = {name: value.clone() for name, value in pair.model.state_dict().items()}
    saved = pair.opt.state_dict()
    model, opt = pair.offloaded()
    loads = [
        lambda: (model.load_state_dict(weights, assign=True), opt.adopt_replaced()),
        lambda: opt.load_state_dict(saved),
    ]
    for load in loads if order == "model first" else reversed(loads):
        load()
    pair.opt.close()
    pair.model, pair.opt = model, opt
    pair.train(loss_of, 2)
    pair.assert_same()
    pair.close()


def test_a_parameter_that_is_replaced_while_its_update_is_late_keeps_its_own_value():
    model = nn.Linear(4, 4)
    opt = zofftk.OffloadAdamW(model.parameters(), lr=0.1, update="delayed", delay_after=0)
    model(torch.ones(1, 4)).sum().backward()
    opt.step()
    opt.zero_grad()
    model.weight = nn.Parameter(torch.full((4, 4), 5.0))
    opt.adopt_replaced()
    before = model.bias.detach().clone()
    opt.flush()
    assert (model.weight == 5.0).all()
    assert not torch.equal(model.bias, before)
    opt.close()


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_a_refresh_after_loading_drops_nothing(order):
    pair = Pair(mlp, {})
    pair.train(loss_of, 3)
    weights = {name: value.clone() for name, value in pair.model.state_dict().items()}
    saved = pair.opt.state_dict()
    model, opt = pair.offloaded()
    loads = [lambda: model.load_state_dict(weights), lambda: opt.load_state_dict(saved)]
    for load in loads if order == "model first" else reversed(loads):
        load()
        opt.refresh()
    pair.opt.close()
    pair.model, pair.opt = model, opt
    pair.train(loss_of, 2)
    pair.assert_same()
    pair.close()


@each_mode
def test_loading_and_flushing_again_and_again(mode):
    pair = Pair(mlp, mode)
    pair.train(loss_of, 3)
    weights = {name: value.clone() for name, value in pair.model.state_dict().items()}
    saved = torch.utils._pytree.tree_map(
        lambda value: value.clone() if isinstance(value, torch.Tensor) else value, pair.opt.state_dict()
    )
    pair.plain.flush()
    for update in ("delayed", "synchronous", "delayed"):
        pair.opt.switch_update(update)
        for _ in range(3):
            pair.model.load_state_dict(weights)
            pair.opt.load_state_dict(saved)
            pair.opt.flush()
            pair.opt.synchronize()
            pair.assert_same_params()
    pair.close()


@each_mode
def test_a_state_that_is_deleted_while_its_update_runs_starts_anew(mode):
    device = EmulatedDevice(delays=3, max_delay_ms=2.0, poison=True)
    pair = Pair(lambda: nn.Linear(70, 70, bias=False), mode, device=device)
    for step in range(4):
        pair.opt.state.clear()  # waits for nothing
        (pair.model(torch.ones(1, 70)).sum() * (1 + step)).backward()
        pair.opt.step()
        pair.opt.zero_grad()
    state = pair.opt.state[pair.model.weight]
    assert state["step"] == 1
    torch.testing.assert_close(state["exp_avg"], torch.full((70, 70), 0.4))
    pair.opt.close()
