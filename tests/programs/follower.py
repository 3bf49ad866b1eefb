"""The anchor of the plain reference: torch's own optimizer on fp32 parameters, with ordinary gradients in `p.grad`.

It follows programs whose rules are torch's own: fp32, a zero_grad after each step and before a change of optimizers,
nothing that rewinds masters, no delay. AdamW goes in the place of what torch does not have.

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

from tests.programs.draw import Op, Program
from tests.programs.draw_runs import draw_with_runs
from tests.programs.plain import Plain
from tests.programs.plain_reference import Gradient, Refused, Row
from tests.programs.user import User

NOT_TORCHS = {
    "refused",
    "read_grad",
    "refresh",
    "edit_data",
    "load",
    "put_aside",
    "put_back",
    "load_damaged",
    "switch_update",
    "flush",
}
TORCHS = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
    "nesterov": torch.optim.SGD,
}
TORCHS_OPTIONS = {"wire_dtype": None, "update": "synchronous"}  # what is left of them it does not look at
RELATIVE = 1e-5  # of torch's norms in fp32 against sums in fp64, which clipping brings into everything
TINY = 1e-30  # where fp32 runs out of exponents


def followable(seed: int) -> Program:
    """The program of `seed`, made fit for torch's optimizer."""
    program = draw_with_runs(seed)
    return dataclasses.replace(
        program,
        ops=[_with_torchs_options(op) for op in program.ops if op.name not in NOT_TORCHS],
        blocks=[dataclasses.replace(block, dtype=torch.float32) for block in program.blocks],
        options={**program.options, **TORCHS_OPTIONS},
        optimizer=program.optimizer if program.optimizer in TORCHS else "AdamW",
    )


def _with_torchs_options(op: Op) -> Op:
    if op.name == "save_run" and op.args["how"] == "direct":
        return Op(op.name, {**op.args, "how": "torch"})  # torch's would train on the tensors of the saved dict
    if "options" not in op.args:
        return op
    return Op(op.name, {**op.args, "options": {**op.args["options"], **TORCHS_OPTIONS}})


class Clipped(torch.optim.Optimizer):
    """Before one of torch's: with the clipping inside, and a step skipped where the norm is not finite."""

    max_grad_norm: float | None = None
    skipped_steps = 0

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


CLIPPED = {name: type(f"Clipped{name}", (Clipped, kind), {}) for name, kind in TORCHS.items()}


class Follower(User):
    def build(self, groups: list[dict[str, Any]], options: dict[str, Any]) -> None:
        if not self.program.named:
            groups = [{**group, "params": [param for _, param in group["params"]]} for group in groups]
        self.opt = CLIPPED[self.program.optimizer](groups)
        self.opt.max_grad_norm = options["max_grad_norm"]
        self.schedule_of = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.opt.step(closure)

    def hand_over(self) -> None:
        pass

    def sizes(self) -> list[torch.Tensor]:
        """Of the terms that SGD adds up: each parameter and its momentum, element by element."""
        momenta = [self.opt.state.get(param, {}).get("momentum_buffer") for param in self.params]
        return [
            param.detach().abs() + (0.0 if momentum is None else momentum.abs())
            for param, momentum in zip(self.params, momenta, strict=True)
        ]


def follow(program: Program) -> None:
    """Raises AssertionError where the reference is not where torch is."""
    follower, plain = Follower(program), Plain(program)
    for number, op in enumerate(program.ops):
        after_step = bool(number) and "step" in program.ops[number - 1].name
        if (after_step and op.name != "zero_grad") or op.name == "reload":
            _run_one(follower, plain, Op("zero_grad", {"set_to_none": True}))
        before = follower.sizes()
        _run_one(follower, plain, op)
        _compare_and_align(follower, plain, op, before, f"after operation {number} {op}")
    plain.close()


def _compare_and_align(follower: Follower, plain: Plain, op: Op, before: list[torch.Tensor], when: str) -> None:
    assert follower.opt.skipped_steps == plain.opt.skipped_steps, when
    lr = max(float(group["lr"]) for group in plain.opt.groups)
    for position, (param, other) in enumerate(zip(follower.params, plain.params, strict=True)):
        what = f"parameter {position} {when}"
        by_sgd = isinstance(follower.opt, torch.optim.SGD)
        row, state = plain.opt.rows.get(id(other)), follower.opt.state.get(param)
        # The largest decay that is drawn, which Adam adds to the gradient; AdamW does not.
        decay = before[position] * (0.3 if plain.program.optimizer == "Adam" else 0.0)
        _align(param.detach(), other.detach(), 1e-5 * (before[position] if by_sgd else _adams(lr, row, decay)), what)
        if row is not None and row.shown:
            _compare_and_align_states(state, row, before[position], decay, what)
        elif not by_sgd:  # which leaves an entry for momentum where it uses none
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


def _adams(lr: float, row: Row | None, decay: torch.Tensor) -> torch.Tensor | float:
    """How far an update goes, and how much more where what it divides by is what a sum that cancels out has left."""
    if row is None or "exp_avg_sq" not in row.moments:
        return lr
    return lr * (1.0 + 10 * decay / (row.moments["exp_avg_sq"].sqrt().view(decay.shape) + 1e-8))


def _compare_and_align_states(state: Any, row: Row, before: torch.Tensor, decay: torch.Tensor, what: str) -> None:
    """A sum may cancel out; `allowed` is by how large what it is made of was."""
    moments = {name: moment.view(row.param.shape) for name, moment in row.moments.items()}
    if "exp_avg_sq" in moments:
        assert state["step"] == row.step, what
        root = moments["exp_avg_sq"].sqrt()
        allowed = {"exp_avg": 1e-5 * (root + decay), "exp_avg_sq": 1e-5 * decay * root}
    else:
        allowed = {name: 1e-5 * (before + moment.abs()) for name, moment in moments.items()}
    for name, moment in moments.items():
        _align(state[name], moment, allowed[name], f"{name} of {what}")


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
