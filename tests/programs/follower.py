"""The anchor of the plain reference: `torch.optim.AdamW` on fp32 parameters, with ordinary gradients in `p.grad`.

It follows programs whose rules are torch's own: fp32, a zero_grad after each step and before a change of optimizers,
nothing that rewinds masters.

After each operation the two are compared, and torch goes on from the bits of the reference. So its forward and backward
deliver the very same gradients, and what is left between the two is the rounding of one operation. Left to themselves
they would part: the true gradient before a LayerNorm of width 1 is zero, and what comes instead is the rounding of the
forward, which one last bit of a weight makes another number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from tests.programs.draw import Op, Program, draw
from tests.programs.plain import Plain
from tests.programs.plain_reference import Gradient, Refused
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
RELATIVE = 1e-5  # of torch's norms in fp32 against sums in fp64, which clipping brings into everything
TINY = 1e-30  # where fp32 runs out of exponents


def followable(seed: int) -> Program:
    """The program of `seed`, made fit for torch's optimizer."""
    program = draw(seed)
    return dataclasses.replace(
        program,
        ops=[_without_wire_dtype(op) for op in program.ops if op.name not in NOT_TORCHS],
        blocks=[dataclasses.replace(block, dtype=torch.float32) for block in program.blocks],
        options={**program.options, "wire_dtype": None},
        optimizer="AdamW",
    )


def _without_wire_dtype(op: Op) -> Op:
    return Op(op.name, {"options": {**op.args["options"], "wire_dtype": None}}) if op.name == "reload" else op


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
    for number, op in enumerate(program.ops):
        after_step = bool(number) and "step" in program.ops[number - 1].name
        if (after_step and op.name != "zero_grad") or op.name == "reload":
            _run_one(follower, plain, Op("zero_grad", {"set_to_none": True}))
        _run_one(follower, plain, op)
        _compare_and_align(follower, plain, op, f"after operation {number} {op}")
    plain.close()


def _compare_and_align(follower: Follower, plain: Plain, op: Op, when: str) -> None:
    assert follower.opt.skipped_steps == plain.opt.skipped_steps, when
    lr = max(float(group["lr"]) for group in plain.opt.groups)
    for position, (param, other) in enumerate(zip(follower.params, plain.params, strict=True)):
        what = f"parameter {position} {when}"
        _align(param.detach(), other.detach(), 1e-5 * lr, what)
        row, state = plain.opt.rows.get(id(other)), follower.opt.state.get(param)
        if row is not None and row.shown:
            assert state["step"] == row.step, what
            # A mean may cancel out; the mean square says how large what it is made of was.
            scale = row.moments["exp_avg_sq"].sqrt().view(param.shape)
            _align(state["exp_avg"], row.moments["exp_avg"].view(param.shape), 1e-5 * scale, f"exp_avg of {what}")
            _align(state["exp_avg_sq"], row.moments["exp_avg_sq"].view(param.shape), 0.0, f"exp_avg_sq of {what}")
        else:
            assert bool(state) == (id(other) in plain.opt.waiting), what
        if "step" in op.name:
            continue  # it has clipped torch's gradients in place
        gradient = plain.gradient(other)
        if isinstance(gradient, Gradient):
            if gradient.is_zero and param.grad is not None and param.grad.isnan().all():
                param.grad.zero_()  # the engine's own rule: no factor makes anything else of a zero
            gradient = gradient.read().view(param.shape)
        assert (param.grad is None) == (gradient is None), f"gradient of {what}"
        if param.grad is not None:
            noise = 1e-6 if op.name == "add_grad" else 0.0  # what it adds is near 1, and may cancel out
            _align(param.grad, gradient, noise, f"gradient of {what}")


def _align(seen: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor | float, what: str) -> None:
    """`seen` is `expected` but for rounding; from then on it is the same."""
    near = (seen - expected).abs() <= allowed + RELATIVE * expected.abs() + TINY
    close = near & expected.isfinite() | (seen == expected) | seen.isnan() & expected.isnan()
    assert close.all(), f"{what}: {seen[~close][:3].tolist()}, expected {expected[~close][:3].tolist()}"
    with torch.no_grad():
        seen.copy_(expected)


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
