"""The anchor of the plain reference: `torch.optim.AdamW` on fp32 parameters, with ordinary gradients in `p.grad`.

It follows programs whose rules are torch's own: fp32, a zero_grad after each step and before a change of optimizers,
nothing that rewinds masters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from tests.programs.draw import Op, Program, draw
from tests.programs.plain import Plain
from tests.programs.plain_reference import Refused
from tests.programs.user import User

NOT_TORCHS = {
    "refused",
    "read_grad",
    "refresh",
    "edit_data",
    "load",
    "hand_over",
    "take_back",
    "put_aside",
    "put_back",
    "load_damaged",
}


def followable(seed: int) -> Program:
    """The program of `seed`, made fit for torch's optimizer."""
    program = draw(seed)
    return dataclasses.replace(
        program,
        ops=[_gentle(op) for op in program.ops if op.name not in NOT_TORCHS],
        blocks=[dataclasses.replace(block, dtype=torch.float32) for block in program.blocks],
        groups=[{**group, "eps": 1e-3} for group in program.groups],
        options={**program.options, "wire_dtype": None},
    )


def _gentle(op: Op) -> Op:
    """Where eps is small, a gradient near zero takes a full step in a direction that rounding decides."""
    if op.name == "backward":  # the steps of bf16 make small differences large
        return Op(op.name, {**op.args, "autocast": False})
    if op.name == "reload":
        return Op(op.name, {"options": {**op.args["options"], "wire_dtype": None}})
    if op.name == "add_group":
        return Op(op.name, {"hyper": {**op.args["hyper"], "eps": 1e-3}})
    return Op("check") if op.args.get("key") == "eps" else op


class ClippedAdamW(torch.optim.AdamW):
    """torch's, with the clipping inside, and a step skipped where the norm is not finite."""

    def __init__(self, groups: Any, max_grad_norm: float | None) -> None:
        super().__init__(groups)
        self.max_grad_norm = max_grad_norm
        self.skipped_steps = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        if not math.isfinite(torch.nn.utils.get_total_norm([param.grad for param in params])):
            self.skipped_steps += 1
            return loss
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, self.max_grad_norm)
        super().step()
        return loss

    def close(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Follower(User):
    def build(self, groups: list[dict[str, Any]], options: dict[str, Any]) -> None:
        if not self.program.named:
            groups = [{**group, "params": [param for _, param in group["params"]]} for group in groups]
        self.opt = ClippedAdamW(groups, options["max_grad_norm"])  # type: ignore[assignment]
        self.schedule_of = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.opt.step(closure)


def follow(program: Program) -> None:
    """Raises AssertionError where the reference is not where torch is."""
    follower, plain = Follower(program), Plain(program)
    plain.norm_rtol = 1e-3
    for number, op in enumerate(program.ops):
        after_step = bool(number) and "step" in program.ops[number - 1].name
        if (after_step and op.name != "zero_grad") or op.name == "reload":
            _run_one(follower, plain, Op("zero_grad", {"set_to_none": True}))
        _run_one(follower, plain, op)
    assert follower.opt.skipped_steps == plain.opt.skipped_steps
    for position, (param, other) in enumerate(zip(follower.params, plain.params, strict=True)):
        what = f"parameter {position}"
        torch.testing.assert_close(other, param, rtol=1e-3, atol=1e-4, msg=lambda text, what=what: f"{what}: {text}")
        row, state = plain.opt.rows.get(id(other)), follower.opt.state.get(param)
        if row is not None and row.shown:
            assert state["step"] == row.step, what
            exp_avg = row.exp_avg.view(param.shape)
            torch.testing.assert_close(
                exp_avg, state["exp_avg"], rtol=1e-2, atol=1e-6 + 1e-3 * float(exp_avg.abs().sum())
            )
        else:
            assert bool(state) == (id(other) in plain.opt.waiting), what
    plain.close()


def _run_one(follower: Follower, plain: Plain, op: Op) -> None:
    plain.seen = error = None
    try:
        plain.seen = getattr(follower, op.name)(**op.args)
    except Exception as caught:
        error = caught
    try:
        getattr(plain, op.name)(**op.args)
    except (Refused, ArithmeticError) as refused:
        if not isinstance(error, refused.error if isinstance(refused, Refused) else type(refused)):
            raise AssertionError(f"{op} raises {error!r}, expected {refused!r}") from error
    else:
        assert error is None, (op, error)
