"""Training without the engine: 16-bit parameters, fp32 masters beside them, tensor by tensor in one loop."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zofftk import cpu_kernels
from zofftk.clipping import coefficient, global_norm
from zofftk.cpu_adam import adamw_step
from zofftk.layout import BLOCK_NUMEL


class PlainAdamW:
    """The CPU Adam on whole tensors. `OffloadAdamW` has to give the same bits.

    The norm is that of the engine, in fp64: torch's would round it to the gradients' 16 bits.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        **group: Any,
    ) -> None:
        self.max_grad_norm: float = group.pop("max_grad_norm")
        self.params = list(params)
        self.param_groups = [group]  # with lr alone, which the schedule sets
        self.hyper: dict[str, Any] = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.masters = [param.detach().float() for param in self.params]
        self.exp_avgs = [torch.zeros_like(master) for master in self.masters]
        self.exp_avg_sqs = [torch.zeros_like(master) for master in self.masters]
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters, which all need a gradient; nothing where the gradients are not all finite."""
        grads = [gradient(param) for param in self.params]
        norm = global_norm([square_sum(grad) for grad in grads])
        if not math.isfinite(norm):
            return
        self.steps += 1
        scale = coefficient(norm, self.max_grad_norm)
        for number, (param, grad) in enumerate(zip(self.params, grads, strict=True)):
            adamw_step(
                self.masters[number],
                self.exp_avgs[number],
                self.exp_avg_sqs[number],
                grad,
                step=self.steps,
                lr=self.param_groups[0]["lr"],
                grad_scale=scale,
                out=param.detach(),
                **self.hyper,
            )

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    def state_dict(self) -> dict[str, Any]:
        states = {"masters": self.masters, "exp_avgs": self.exp_avgs, "exp_avg_sqs": self.exp_avg_sqs}
        return states | {"steps": self.steps}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name in ("masters", "exp_avgs", "exp_avg_sqs"):
            for mine, its in zip(getattr(self, name), saved[name], strict=True):
                mine.copy_(its)
        self.steps = saved["steps"]


class TorchAdamW:
    """torch's AdamW and torch's clipping on fp32 masters: differs from `PlainAdamW` by rounding alone."""

    def __init__(self, params: Iterable[nn.Parameter], *, max_grad_norm: float, **hyper: Any) -> None:
        self.params, self.max_grad_norm = list(params), max_grad_norm
        self.masters = [nn.Parameter(param.detach().float()) for param in self.params]
        self.inner = torch.optim.AdamW(self.masters, **hyper)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters, which all need a gradient."""
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad = gradient(param).float()
        if not torch.nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm).isfinite():
            return
        self.inner.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"masters": [master.detach() for master in self.masters], "inner": self.inner.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        with torch.no_grad():
            for mine, its in zip(self.masters, saved["masters"], strict=True):
                mine.copy_(its)
        self.inner.load_state_dict(saved["inner"])


def gradient(param: nn.Parameter) -> Tensor:
    assert param.grad is not None, "expected a model whose every parameter has a gradient"
    return param.grad.contiguous()


def square_sum(grad: Tensor) -> float:
    """In fp64, block by block from the start of the tensor, as the engine takes it."""
    sums = torch.empty(-(-grad.numel() // BLOCK_NUMEL), dtype=torch.float64)
    cpu_kernels.block_square_sums(grad, sums, 1)
    total = 0.0
    for block in sums.tolist():
        total += block
    return total
