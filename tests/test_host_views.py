"""`optimizer.state[p]` shows the host's memory, and goes on showing it."""

from __future__ import annotations

import io

import pytest
import torch

import zofftk
from tests.compare import assert_same_bits
from zofftk.state_dict import COUNTS, STATES

pytestmark = pytest.mark.usefixtures("no_threads_left")


def trained(p, steps=1):
    opt = zofftk.OffloadAdamW([p], lr=0.1)
    for _ in range(steps):
        take_step(opt, p)
    return opt


def take_step(opt, p):
    p.grad = torch.full_like(p, 2.0)
    opt.step()


@pytest.mark.parametrize(
    "assign", [lambda state, key, value: state.__setitem__(key, value), lambda s, k, v: s.update({k: v})]
)
def test_states_moved_to_a_device_do_not_go_stale(assign):
    """`state[key] = value.cuda()`, after loading, is a common line. A clone stands for the copy on the device."""
    p, q = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5))
    opt, untouched = trained(p), trained(q)
    for state in opt.state.values():
        for key in list(state):
            assign(state, key, state[key].clone())
    take_step(opt, p)
    take_step(untouched, q)
    assert_same_bits(p.detach(), q.detach())
    for key, value in untouched.state_dict()["state"][0].items():
        assert_same_bits(opt.state_dict()["state"][0][key], value, key)
    opt.close()
    untouched.close()


def test_an_assigned_state_is_taken_over():
    p = torch.nn.Parameter(torch.ones(5))
    opt = trained(p)
    opt.state[p]["exp_avg"] = torch.arange(5, dtype=torch.float64)
    take_step(opt, p)
    torch.testing.assert_close(opt.state[p]["exp_avg"], 0.9 * torch.arange(5) + 0.1 * 2)
    opt.close()


@pytest.mark.parametrize("value", [torch.ones(4), torch.ones(()), 1.0, None])
@pytest.mark.parametrize("key", STATES)
def test_a_state_of_another_shape_is_refused(key, value):
    p = torch.nn.Parameter(torch.ones(5))
    opt = trained(p)
    before = opt.state[p][key].clone()
    with pytest.raises(ValueError, match=rf"the state '{key}' is a tensor of shape \(5,\)"):
        opt.state[p][key] = value
    assert_same_bits(opt.state[p][key], before)
    opt.close()


def test_a_saved_state_is_plain():
    """`torch.load` reads tensors and plain containers only, unless told otherwise."""
    opt = trained(torch.nn.Parameter(torch.ones(5)))
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["state"][0]) is dict
    assert set(loaded["state"][0]) == {*COUNTS, *STATES}
    opt.close()
