"""A program as a user would write it, on a torch optimizer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import zofftk
from tests.programs.draw import Program
from tests.programs.models import losses_of
from tests.programs.optimizers import OPTIMIZERS, edit
from tests.programs.run_file import RunFile
from tests.programs.shared import (
    build_model,
    clip,
    damaged,
    gradient_by_hand,
    half_edited,
    initial_groups,
    noise,
    run_backward,
)
from zofftk.device.emulated import EmulatedDevice
from zofftk.optimizer import OffloadOptimizer
from zofftk.standin import StandIn, StandInError


class User:
    """Each operation is a method; it returns what a user would see of it."""

    def __init__(self, program: Program) -> None:
        self.program, self.choice = program, OPTIMIZERS[program.optimizer]
        self.handle: zofftk.ForwardOverlap | None = None
        self.schedule_of: Any = None
        self.files: list[Any] = []
        self.run: RunFile | None = None  # what a kill leaves
        self.aside: dict[int, Any] = {}  # gradients, by id of the parameter
        self.scale = 1024.0
        self.devices = 0
        self.opt: OffloadOptimizer
        self.take_model()
        self.build(initial_groups(program, self.model), program.options)

    def take_model(self) -> None:
        self.model = build_model(self.program)
        self.params = list(self.model.parameters())
        self.names = {id(param): name for name, param in self.model.named_parameters()}

    def build(self, groups: list[dict[str, Any]], options: dict[str, Any]) -> None:
        if not self.program.named:
            groups = [{**group, "params": [param for _, param in group["params"]]} for group in groups]
        self.devices += 1
        seed = self.program.seed + self.devices
        device = EmulatedDevice(delays=seed, max_delay_ms=0.05 * (seed % 4), poison=True)
        self.opt = self.choice.kind(groups, device=device, **options)
        self.schedule_of = None

    def param(self, position: int) -> torch.nn.Parameter:
        return self.params[position % len(self.params)]

    def close(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.opt.close()

    def end(self) -> None:
        """Go on without the optimizer, also where it says that what was written stands."""
        try:
            self.opt.close()
        except RuntimeError as error:
            if "was written to while a delayed update" not in str(error):
                raise

    # -- backward and step -------------------------------------------------------------------------------------

    def backward(self, **args: Any) -> Any:
        return run_backward(self.model, self.program, lambda: None, **args)

    def broken_backward(self, data: int, skip: int, breaks: int) -> None:
        losses_of(self.model, data, self.program.width, skip, breaks)[1].backward()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        first = self.opt.skipped_steps == 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = self.opt.step(closure)
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == (first and self.opt.skipped_steps == 1), texts
        assert all(text.startswith("a step was skipped") for text in texts), texts
        return result

    def step_with_closure(self, data: int, skip: int, weight: float) -> Any:
        def closure() -> Any:
            self.opt.zero_grad()
            return self.backward(data=data, skip=skip, weight=weight, how="one")

        return self.step(closure)

    def scaled_step(self, data: int, skip: int, weight: float, clip: float | None) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=self.scale, growth_interval=1)
        loss = losses_of(self.model, data, self.program.width, skip)[0] * weight
        scaler.scale(loss).backward()
        norm = None
        if clip is not None:
            scaler.unscale_(self.opt)
            norm = self.clip(1, clip)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            scaler.step(self.opt)
        scaler.update()
        self.scale = scaler.get_scale()
        return norm

    def zero_grad(self, set_to_none: bool) -> None:
        self.opt.zero_grad(set_to_none)

    # -- gradients ---------------------------------------------------------------------------------------------

    def clip(self, every: int, max_norm: float, how: str = "plain") -> torch.Tensor:
        return clip(self.params[::every], max_norm, how)

    def drop_grad(self, param: int) -> None:
        self.param(param).grad = None

    def drop_all(self) -> None:
        self.model.zero_grad()

    def put_aside(self, param: int) -> None:
        tensor = self.param(param)
        if isinstance(tensor.grad, StandIn) and self.opt.grad(tensor) is not None:
            self.aside[id(tensor)], tensor.grad = tensor.grad, None

    def put_back(self, param: int) -> torch.Tensor | None:
        tensor = self.param(param)
        if id(tensor) not in self.aside:
            return None
        tensor.grad = self.aside.pop(id(tensor))
        try:
            return tensor.grad.norm()
        except StandInError:
            tensor.grad = None
            raise

    def set_grad(self, param: int, data: int, bad: bool, wide: bool) -> None:
        self.param(param).grad = gradient_by_hand(self.param(param), data, bad, wide)

    def mul_grad(self, param: int, factor: float, as_tensor: bool) -> None:
        if (grad := self.param(param).grad) is not None:
            grad.mul_(torch.tensor(factor) if as_tensor else factor)

    def div_grad(self, param: int, factor: float, as_tensor: bool) -> None:
        if (grad := self.param(param).grad) is not None:
            grad.div_(torch.tensor(factor) if as_tensor else factor)

    def add_grad(self, param: int, data: int, alpha: float, wide: bool) -> None:
        tensor = self.param(param)
        if tensor.grad is not None:
            other = noise(tensor, data).to(torch.float32 if wide else tensor.dtype)
            tensor.grad.add_(other, alpha=alpha)
            other.fill_(7.0)  # it stays the caller's

    def zero_one(self, param: int) -> None:
        if (grad := self.param(param).grad) is not None:
            grad.zero_()

    def read_grad(self, param: int) -> torch.Tensor | None:
        return self.opt.grad(self.param(param))

    def copy_grad(self, param: int) -> torch.Tensor | None:
        return copy.deepcopy(self.param(param).grad)

    def read_norm(self, param: int) -> torch.Tensor | None:
        grad = self.param(param).grad
        return None if grad is None else grad.norm()

    def refused(self, param: int, how: str) -> None:
        tensor = self.param(param)
        if isinstance(tensor.grad, StandIn):
            {
                "clip_value": lambda: torch.nn.utils.clip_grad_value_([tensor], 1.0),
                "inf_norm": lambda: torch.nn.utils.clip_grad_norm_([tensor], 1.0, norm_type=float("inf")),
                "plus": lambda: tensor.grad + 1,
                "numpy": lambda: np.asarray(tensor.grad),
            }[how]()

    # -- between steps -----------------------------------------------------------------------------------------

    def change(self, group: int, key: str, value: Any) -> None:
        self.opt.param_groups[group % len(self.opt.param_groups)].update(self.choice.hyper({key: value}))

    def schedule(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there was no step before
            self.schedule_of = self.schedule_of or torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.9)
            self.schedule_of.step()

    def tensor_lr(self, group: int, lr: float) -> None:
        self.change(group, "lr", torch.tensor(lr))

    def edit_state(self, param: int) -> None:
        if state := self.opt.state.get(self.param(param)):
            self.opt.synchronize()
            edit(state)

    def freeze(self, param: int) -> None:
        self.param(param).requires_grad_(False)

    def unfreeze(self, param: int) -> None:
        self.param(param).requires_grad_(True)

    def add_group(self, hyper: dict[str, Any]) -> None:
        held = {id(param) for group in self.opt.param_groups for param in group["params"]}
        new = [(name, param) for name, param in self.model.named_parameters() if id(param) not in held]
        if new:
            params: Any = new if self.program.named else [param for _, param in new]
            self.opt.add_param_group({**self.choice.hyper(hyper), "params": params})

    def load_weights(self, data: int) -> None:
        weights = {name: half_edited(value, data) for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(weights)

    def edit(self, param: int, data: int) -> None:
        with torch.no_grad():
            self.param(param).copy_(half_edited(self.param(param), data))

    def edit_data(self, param: int, data: int, refresh: bool) -> None:
        self.param(param).data.copy_(half_edited(self.param(param), data))
        if refresh:
            self.opt.refresh()

    def refresh(self) -> None:
        self.opt.refresh()

    def save(self) -> None:
        self.files.append(copy.deepcopy(self.opt.state_dict()))

    def load(self, which: int) -> None:
        if self.files:
            self.opt.load_state_dict(self.files[which % len(self.files)])

    def load_damaged(self, damage: str) -> None:
        self.opt.load_state_dict(damaged(copy.deepcopy(self.opt.state_dict()), damage))

    def reload(self, options: dict[str, Any]) -> None:
        """The state goes into a fresh optimizer with other options."""
        handed_over = self.handle is not None
        saved = copy.deepcopy(self.opt.state_dict())
        self.take_back()
        self.aside.clear()
        groups = [
            {"params": [(self.names[id(param)], param) for param in group["params"]]} for group in self.opt.param_groups
        ]
        self.end()
        self.build(groups, options)
        self.opt.load_state_dict(saved)
        if handed_over:
            self.hand_over()

    def switch_update(self, update: str, delay_after: int) -> None:
        self.opt.switch_update(update, delay_after)

    def flush(self) -> None:
        self.opt.flush()

    def save_run(self, how: str, optimizer_first: bool) -> Any:
        parts = {"model": self.model.state_dict, "optimizer": self.opt.state_dict}
        content: dict[str, Any] = {name: parts[name]() for name in sorted(parts, reverse=optimizer_first)}
        content["groups"] = [[self.names[id(param)] for param in group["params"]] for group in self.opt.param_groups]
        content["frozen"] = [self.names[id(param)] for param in self.params if not param.requires_grad]
        self.run = RunFile(how, content)
        return content["optimizer"].get("delayed")

    def resume(
        self, options: dict[str, Any], optimizer_first: bool, frozen_as_saved: bool, hand_over: str | None
    ) -> None:
        """The run was killed: what was saved of it goes into a new model and a new optimizer."""
        if self.run is None:
            return
        self.end()  # for its threads; nobody will see what it does to the old model
        self.handle = None
        self.aside.clear()
        self.take_model()
        content, named = self.run.load(), dict(self.model.named_parameters())
        for name, param in named.items() if frozen_as_saved else ():
            param.requires_grad_(name not in content["frozen"])
        self.build([{"params": [(name, named[name]) for name in names]} for names in content["groups"]], options)
        if hand_over == "before":
            self.hand_over()
        parts = {"model": self.model.load_state_dict, "optimizer": self.opt.load_state_dict}
        for name in sorted(parts, reverse=optimizer_first):
            parts[name](content[name])
        if hand_over == "after":
            self.hand_over()

    def delete_state(self, param: int, how: str) -> None:
        tensor = self.param(param)
        if tensor in self.opt.state and how == "clear":
            self.opt.state[tensor].clear()
        elif tensor in self.opt.state:
            del self.opt.state[tensor]

    def evaluate(self, data: int, skip: int) -> Any:
        self.model.eval()
        with torch.inference_mode() if data % 2 else torch.no_grad():
            losses = losses_of(self.model, data, self.program.width, skip)
        self.model.train()
        return losses

    def copy_model(self) -> list[torch.Tensor]:
        return [param.detach() for param in copy.deepcopy(self.model).parameters()]

    def hand_over(self) -> None:
        if self.handle is None:
            self.handle = zofftk.offload(self.model, self.opt)

    def take_back(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    def check(self) -> None:
        """Everything is compared after it, also where the model was handed over."""
        for param in self.params[::2]:
            param.sum()  # its new value has landed before it is read
        self.opt.synchronize()
