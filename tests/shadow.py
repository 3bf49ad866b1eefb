"""`torch.optim.AdamW` beside an `OffloadAdamW`: on fp32 masters, fed with the same gradients, compared at each step."""

from __future__ import annotations

from typing import Any

import torch

from tests.compare import assert_same_bits
from zofftk import OffloadAdamW

MOMENTS = ("exp_avg", "exp_avg_sq")


class Shadow:
    """Call `feed` when the gradients are what the step will use; `check` runs after each step, by a hook.

    Each step starts from the states of the optimizer that is looked at, so the bound is that of one step: 2 ulp of
    the larger of the old value and the term added, against torch's fused loop, whose square root is the processor's.
    """

    def __init__(self, opt: OffloadAdamW, *, feeds_itself: bool = True) -> None:
        self.opt = opt
        self.names = opt._names()
        self.params = [param for group in opt.param_groups for param in group["params"] if param.requires_grad]
        self.masters = {param: param.detach().float().clone().requires_grad_() for param in self.params}
        self.torch = torch.optim.AdamW([{"params": [self.masters[param]]} for param in self.params], fused=True)
        self.grads: list[dict[str, torch.Tensor]] = []  # of each step, by name, as the update has used them
        if feeds_itself:
            opt.register_step_pre_hook(lambda *_: self.feed())
        opt.register_step_post_hook(lambda *_: self.check())

    def feed(self) -> None:
        hypers = {param: group for group in self.opt.param_groups for param in group["params"]}
        self.before: dict[torch.Tensor, list[torch.Tensor]] = {}
        for group, param in zip(self.torch.param_groups, self.params, strict=True):
            group.update({key: hypers[param][key] for key in ("lr", "betas", "eps", "weight_decay")})
            master = self.masters[param]
            master.grad = self.opt.grad(param) if param.grad is not None else None
            self._take_over(param)
            self.before[param] = [master.detach().clone(), *_moments(self.torch.state.get(master), master)]
        self.grads.append({self.names[id(p)]: self.masters[p].grad.clone() for p in self.params if p.grad is not None})

    def _take_over(self, param: torch.Tensor) -> None:
        """Weights or a state may have been loaded since the last step."""
        master, state = self.masters[param], self.opt.state.get(param)
        with torch.no_grad():
            master.copy_(param)
            if state:  # loaded weights replace a master, except where it rounds to them
                master.copy_(torch.where(state["master"].to(param.dtype) == param, state["master"], master))
        if state:
            self.torch.state[master] = {name: state[name].clone() for name in ("step", *MOMENTS)}

    @torch.no_grad()
    def check(self) -> None:
        self.torch.step()
        self.opt.synchronize()  # where the model was handed over, the new values are still on their way
        for param in self.params:
            master, name = self.masters[param], self.names[id(param)]
            if master.grad is None and not self.opt.state.get(param):
                assert_same_bits(param.detach(), self.before[param][0].to(param.dtype), name)
                continue
            state = self.opt.state[param]
            assert state["step"] == self.torch.state[master]["step"], name
            ours = [state["master"], *_moments(state, param)]
            theirs = [master.detach(), *_moments(self.torch.state[master], master)]
            for what, a, b, old in zip(("master", *MOMENTS), ours, theirs, self.before[param], strict=True):
                if master.grad is None:
                    assert_same_bits(a, old, f"{what} of {name}, which had no gradient")
                ulps = (a - b).abs() / torch.maximum(_ulp(old), _ulp(b - old))
                assert (ulps <= 2).all(), f"{what} of {name} is {ulps.max():.1f} ulp from torch's"
            assert_same_bits(param.detach(), state["master"].to(param.dtype), name)


def _moments(state: Any, like: torch.Tensor) -> list[torch.Tensor]:
    zeros = torch.zeros_like(like, dtype=torch.float32)
    return [state[name].detach().clone() if state else zeros for name in MOMENTS]


def _ulp(value: torch.Tensor) -> torch.Tensor:
    """Distance to the next float of the same magnitude."""
    magnitude = value.abs().clamp_min(torch.finfo(torch.float32).tiny)
    return torch.nextafter(magnitude, torch.tensor(float("inf"))) - magnitude
