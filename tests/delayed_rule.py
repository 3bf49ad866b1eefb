"""The delayed update in its plainest form, and a model trained by it beside the same model trained by the engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zofftk
from tests.compare import assert_same_bits
from tests.programs.optimizers import OPTIMIZERS
from tests.programs.plain_reference import square_sum
from zofftk.device.emulated import EmulatedDevice

# How the engine is set up: options of the optimizer, and whether the model is handed over. Every test that makes one
# backward a step goes through all of them; one that makes several, through those that do not announce one.
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "handed over": {"hand_over": True},
    "inside backward": {"backwards_per_step": 1},
}
MANY = {name: mode for name, mode in MODES.items() if mode.get("backwards_per_step") is None}
each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
each_mode_of_many_backwards = pytest.mark.parametrize("mode", MANY.values(), ids=list(MANY))
each_delay = pytest.mark.parametrize("delay_after", [0, 3])

HYPER: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    "Adam": {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    "Lion": {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "nesterov": False},
    "nesterov": {"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1, "nesterov": True},
}


class Delayed(torch.optim.Optimizer):
    """From step `delay_after` + 1 on, a gradient is applied at the next step, with the hyper-parameters of its own.

    A step whose gradients are not all finite applies what is late and leaves nothing. Gradients are taken as they are
    delivered; from the second one of a step on, they are summed in fp32. `factor` multiplies those of this step.
    """

    def __init__(self, groups: Any, kind: str, delay_after: int, max_grad_norm: float | None) -> None:
        self.update, self.delay_after, self.max_grad_norm = OPTIMIZERS[kind].update, delay_after, max_grad_norm
        self.grads: dict[torch.Tensor, torch.Tensor] = {}
        self.late: list[Any] = []
        self.factor, self.steps, self.skipped = 1.0, 0, False
        super().__init__(groups, HYPER[kind])

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if not self.grads:
            return
        self.flush()
        norm = math.sqrt(sum(self.square_sums()))
        self.steps += 1
        self.skipped = not math.isfinite(norm)
        if not self.skipped:
            clip = 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (norm + 1e-6))
            hypers = {p: dict(group) for group in self.param_groups for p in group["params"]}
            self.late = [(p, grad, self.factor * clip, hypers[p]) for p, grad in self.grads.items()]
        if self.steps <= self.delay_after:
            self.flush()

    def flush(self) -> None:
        for p, grad, factor, hyper in self.late:
            state, new = self.state[p], torch.empty(p.numel(), dtype=p.dtype)
            state["step"] += 1
            self.update(state["master"], state, grad, new, hyper, step=state["step"], grad_scale=factor, threads=1)
            with torch.no_grad():
                p.copy_(new.view_as(p))
        self.late = []

    # -- gradients ---------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.watch()

    def watch(self) -> None:
        """Take the gradients of what is trainable now; `state` is in the order in which they first were."""
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.requires_grad and p not in self.state:
                self.state[p] = {"step": 0, "master": p.detach().float().clone().view(-1)}
                p.register_post_accumulate_grad_hook(self.take)

    def take(self, p: torch.Tensor) -> None:
        assert p.grad is not None
        grad, p.grad = p.grad.reshape(-1), None
        self.grads[p] = self.grads[p].float() + grad.float() if p in self.grads else grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.grads, self.factor = {}, 1.0
        self.watch()

    def square_sums(self) -> list[float]:
        return [square_sum(self.grads[p]) * self.factor**2 for p in self.state if p in self.grads]

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """torch's, on norms and factors that are not rounded to the gradients' dtype."""
        norms = torch.tensor([math.sqrt(one) for one in self.square_sums()], dtype=torch.float64)
        norm = torch.linalg.vector_norm(norms)
        self.factor *= float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm


class Pair:
    """The same model twice: `model` with the engine's optimizer `opt`, and `twin` with the rule's, `plain`."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        mode: dict[str, Any],
        kind: str = "AdamW",
        *,
        delay_after: int = 0,
        groups: Callable[[nn.Module], Any] = lambda model: [{"params": [*model.parameters()]}],
        **options: Any,
    ) -> None:
        self.kind, self.mode, self.groups = kind, mode, groups
        self.build, self.delay_after = build, delay_after
        self.model, self.opt = self.offloaded(**options)
        self.twin = build()
        self.plain = Delayed(groups(self.twin), kind, delay_after, options.get("max_grad_norm"))
        self.steps = 0

    def offloaded(self, **options: Any) -> tuple[nn.Module, Any]:
        """Another model with another optimizer of the same kind."""
        options = {"update": "delayed", "delay_after": self.delay_after, "bucket_bytes": 1, **options, **self.mode}
        hand_over = options.pop("hand_over", False)
        options.setdefault("device", EmulatedDevice(delays=1, max_delay_ms=0.1, poison=True))
        model = self.build()
        opt = OPTIMIZERS[self.kind].kind(self.groups(model), **{**HYPER[self.kind], **options})
        if hand_over:
            zofftk.offload(model, opt)
        return model, opt

    def backward(
        self,
        loss: Callable[[nn.Module, int], torch.Tensor],
        step: int | None = None,
        scaled: tuple[Callable[[Any], Any], Callable[[Any], Any]] = (lambda loss: loss, lambda loss: loss),
    ) -> None:
        """One backward on each side, on what `scaled` makes of its loss; the losses have the same bits."""
        step = self.steps if step is None else step
        ours, theirs = loss(self.model, step), loss(self.twin, step)
        assert_same_bits(ours, theirs, f"loss of step {step}")
        scaled[0](ours).backward()
        scaled[1](theirs).backward()

    def step(self) -> None:
        for each in (self.opt, self.plain):
            each.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """The end of a step."""
        for each in (self.opt, self.plain):
            each.zero_grad()
        self.steps += 1

    def train(self, loss: Callable[[nn.Module, int], torch.Tensor], steps: int) -> None:
        for _ in range(steps):
            self.backward(loss)
            self.step()

    def flush(self) -> None:
        self.opt.flush()
        self.plain.flush()

    def assert_same_params(self) -> None:
        for (name, p), q in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
            assert_same_bits(p.detach(), q.detach(), name)

    def assert_same(self) -> None:
        """Parameters and states, after a flush of both."""
        self.assert_same_params()
        self.flush()
        self.assert_same_params()
        for (name, p), q in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
            expected, state = self.plain.state.get(q), self.opt.state.get(p)
            if not expected or not expected["step"]:
                assert not state, name
                continue
            assert set(state) == set(expected), name
            assert state["step"] == expected["step"], name
            for key in expected.keys() - {"step"}:
                assert_same_bits(state[key].reshape(-1), expected[key], f"{key} of {name}")

    def close(self) -> None:
        """The parameters it leaves are those of the flushed twin."""
        self.opt.close()
        self.plain.flush()
        self.assert_same_params()


def mlp(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """The same weights on every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 70), nn.Tanh(), nn.Linear(70, 70), nn.Tanh(), nn.Linear(70, 4)).to(dtype)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """The same on every call."""
    x = torch.full((3, 16), 0.25 + 0.125 * (step % 7), dtype=next(model.parameters()).dtype)
    return model(x).float().square().sum() * (1 + step % 3)
