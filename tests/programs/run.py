"""Run a program on both sides and find the first difference; make a failing program small."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any
from unittest.mock import patch

import torch

from tests.compare import assert_same_bits
from tests.programs.draw import Op, Program
from tests.programs.plain import Plain
from tests.programs.plain_reference import Gradient, Refused
from tests.programs.user import User
from zofftk import hooks
from zofftk.checked import CheckedAccess

CHECKED = ("backward", "evaluate", "step", "step_with_closure")


class Difference(AssertionError):
    """What differed, after which operation."""


def run(program: Program) -> None:
    """Raises `Difference`."""
    inside = "backwards_per_step" in program.options
    with patch.object(hooks, "INBOX_SIZE", 1) if inside else nullcontext():  # small gradients count as large ones
        _run(program, inside)


def _run(program: Program, inside: bool) -> None:
    plain = Plain(program)
    user = User(program)
    done, exchanging = "", False
    try:
        for number, op in enumerate([*program.ops, Op("check")]):
            done = f"{number} {op}"
            _run_one(user, plain, op)
            exchanging = inside and (op.name == "backward" or (exchanging and op.name != "step"))
            _compare(user, plain, full=(user.handle is None and not exchanging) or op.name == "check")
        done = "close()"
        _run_one(user, plain, Op("close"))
        for position, (param, other) in enumerate(zip(user.params, plain.params, strict=True)):
            assert_same_bits(param.detach(), other.detach(), f"parameter {position}")
    except Exception as error:
        with suppress(Exception):
            user.close()
        raise Difference(f"after operation {done}: {type(error).__name__}: {error}") from error
    finally:
        plain.close()


def _run_one(user: User, plain: Plain, op: Op) -> None:
    error: BaseException | None = None
    plain.seen = None
    try:
        with CheckedAccess(user.opt) if user.program.checked and op.name in CHECKED else nullcontext():
            plain.seen = getattr(user, op.name)(**op.args)
    except Exception as caught:
        error = caught
    try:
        expected = getattr(plain, op.name)(**op.args)
    except Refused as refused:
        if not isinstance(error, refused.error) or refused.text not in str(error):
            raise AssertionError(f"expected {refused.error.__name__} '{refused.text}', got {error!r}") from error
        return
    except ArithmeticError as refused:
        if not isinstance(error, ArithmeticError):
            raise AssertionError(f"expected {refused!r}, got {error!r}") from error
        return
    if error is not None:
        raise AssertionError(f"expected no error, got {type(error).__name__}: {error}") from error
    _compare_values(plain.seen, expected)


def _compare_values(seen: Any, expected: Any) -> None:
    if isinstance(expected, list):
        for one, other in zip(seen, expected, strict=True):
            _compare_values(one, other)
    elif isinstance(expected, torch.Tensor):
        assert isinstance(seen, torch.Tensor), f"result {seen!r}, expected {expected!r}"
        assert_same_bits(seen, expected, "result")
    else:
        assert seen == expected, f"result {seen!r}, expected {expected!r}"


def _compare(user: User, plain: Plain, full: bool) -> None:
    opt, reference = user.opt, plain.opt
    for name in ("skipped_steps", "last_step_skipped"):
        assert getattr(opt, name) == getattr(reference, name), (name, getattr(opt, name))
    _compare_norms(opt.last_grad_norm, reference.last_grad_norm)
    assert user.scale == plain.scale
    for position, (param, other) in enumerate(zip(user.params, plain.params, strict=True)):
        what = f"parameter {position}"
        gradient = plain.gradient(other)
        if isinstance(gradient, torch.Tensor):
            assert type(param.grad) is torch.Tensor, f"grad of {what} is {param.grad!r}"
            assert_same_bits(param.grad, gradient, f"grad of {what}")
        else:
            kind = "StandIn" if isinstance(gradient, Gradient) else "NoneType"
            assert type(param.grad).__name__ == kind, f"grad of {what} is {param.grad!r}, expected {kind}"
        if full:
            assert_same_bits(param.detach(), other.detach(), what)
            _compare_state(opt.state.get(param), reference, other, what)


def _compare_norms(seen: float | None, expected: float | None) -> None:
    both_nan = seen is not None and expected is not None and math.isnan(seen) and math.isnan(expected)
    assert both_nan or seen == expected, f"last_grad_norm {seen!r}, expected {expected!r}"


def _compare_state(state: Any, reference: Any, param: torch.Tensor, what: str) -> None:
    row = reference.rows.get(id(param))
    if row is None:
        assert bool(state) == (id(param) in reference.waiting), f"state of {what}: {state}"
    elif not row.shown:
        assert not state, f"{what} has a state"
    else:
        assert state, f"{what} has no state"
        assert state["step"] == row.step, f"step of {what} is {state['step']}, expected {row.step}"
        expected = {"master": row.master, **row.moments}
        assert set(state) == {"step", *expected}, f"state of {what}: {sorted(state)}"
        for name, value in expected.items():
            assert_same_bits(state[name], value.view(param.shape), f"{name} of {what}")


# -- smaller -------------------------------------------------------------------------------------------------------


def difference(program: Program, runs: Callable[[Program], None] = run) -> str | None:
    try:
        runs(program)
    except AssertionError as error:
        return str(error)
    return None


def shrink(program: Program, runs: Callable[[Program], None] = run) -> Program:
    """Leave out operations, from large pieces to single ones, as long as there is a difference."""
    ops = list(program.ops)
    size = len(ops)
    while size:
        start = 0
        while start < len(ops):
            fewer = ops[:start] + ops[start + size :]
            if difference(dataclasses.replace(program, ops=fewer), runs) is None:
                start += size
            else:
                ops = fewer
        size //= 2
    return dataclasses.replace(program, ops=ops)
