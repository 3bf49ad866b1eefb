"""The same program by the plain reference: what a user is to see of each operation."""

from __future__ import annotations

import copy
import math
from contextlib import suppress
from typing import Any

import torch

from tests.programs.draw import Program
from tests.programs.models import losses_of
from tests.programs.optimizers import OPTIMIZERS, edit
from tests.programs.plain_reference import Gradient, PlainOptimizer, Refused, Row
from tests.programs.shared import build_model, clip, gradient_by_hand, half_edited, initial_groups, noise, run_backward
from zofftk.standin import StandInError


class Plain:
    """Each operation is a method; raises `Refused` where it is a documented error."""

    def __init__(self, program: Program) -> None:
        self.program, self.choice = program, OPTIMIZERS[program.optimizer]
        self.model = build_model(program)
        self.params = list(self.model.parameters())
        self.files: list[Any] = []
        self.run: dict[str, Any] | None = None  # what a kill leaves
        self.kept: set[int] = set()  # ids of parameters whose gradient was put aside
        self.scale = 1024.0
        self.seen: Any = None  # the user's result of the operation
        groups = initial_groups(program, self.model)
        groups = [{**group, "params": [param for _, param in group["params"]]} for group in groups]
        self.opt = self.build(groups, program.options)

    def build(self, groups: list[dict[str, Any]], options: dict[str, Any]) -> PlainOptimizer:
        delay_after = options["delay_after"] if options.get("update") == "delayed" else None
        return PlainOptimizer(self.choice.update, groups, options["max_grad_norm"], options["wire_dtype"], delay_after)

    def param(self, position: int) -> torch.nn.Parameter:
        return self.params[position % len(self.params)]

    def row(self, position: int) -> Row | None:
        return self.opt.rows.get(id(self.param(position)))

    def gradient(self, param: torch.Tensor) -> torch.Tensor | Gradient | None:
        """What `p.grad` is or stands for."""
        row = self.opt.rows.get(id(param))
        return row.gradient if param.grad is None and row is not None else param.grad

    def close(self) -> None:
        self.opt.close()

    def end(self) -> None:
        with suppress(Refused):
            self.opt.close()

    # -- backward and step -------------------------------------------------------------------------------------

    def backward(self, **args: Any) -> Any:
        return run_backward(self.model, self.program, self.opt.begin_backward, **args)

    def broken_backward(self, data: int, skip: int, breaks: int) -> None:
        self.opt.begin_backward()
        losses_of(self.model, data, self.program.width, skip, breaks)[1].backward()

    def step(self) -> None:
        self.opt.step()

    def step_with_closure(self, data: int, skip: int, weight: float) -> Any:
        self.opt.zero_grad(True)
        result = self.backward(data=data, skip=skip, weight=weight, how="one")
        self.opt.step()
        return result

    def scaled_step(self, data: int, skip: int, weight: float, clip: float | None) -> Any:
        loss = losses_of(self.model, data, self.program.width, skip)[0] * weight
        self.opt.begin_backward()
        (loss * torch.tensor(self.scale)).backward()
        gradients = [gradient for param in self.opt.params() if (gradient := self.gradient(param)) is not None]
        found = self._unscale(gradients)
        norm = None if clip is None else self.clip(1, clip)
        if not gradients:
            raise Refused(AssertionError, "No inf checks")  # torch's own
        if not found:
            self.opt.step()
        self.scale *= 0.5 if found else 2.0
        return norm

    def _unscale(self, gradients: list[torch.Tensor | Gradient]) -> bool:
        """Divide the gradients by the loss scale; says whether one of them is not finite."""
        if any(isinstance(gradient, torch.Tensor) and gradient.dtype == torch.float16 for gradient in gradients):
            raise Refused(ValueError, "unscale FP16")  # torch's own limit, on gradients the engine does not hold
        inverse = torch.tensor(self.scale).double().reciprocal().float()
        found = torch.zeros(1)
        for gradient in gradients:
            if isinstance(gradient, torch.Tensor):
                torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, inverse)
            else:
                found += float(not math.isfinite(gradient.square_sum()))
                gradient.scale(float(inverse))
        return bool(found)

    def zero_grad(self, set_to_none: bool) -> None:
        self.opt.zero_grad(set_to_none)

    # -- gradients ---------------------------------------------------------------------------------------------

    def clip(self, every: int, max_norm: float, how: str = "plain") -> torch.Tensor:
        """torch's rule. The norm, if right, is the user's own: torch may add up the gradients' norms in any order."""
        gradients = [gradient for param in self.params[::every] if (gradient := self.gradient(param)) is not None]
        if all(isinstance(gradient, torch.Tensor) for gradient in gradients):
            try:
                return clip(self.params[::every], max_norm, how)
            except RuntimeError as error:
                raise Refused(RuntimeError, str(error)) from error  # torch's own
        norm = math.sqrt(sum(self._norm(gradient) ** 2 for gradient in gradients))
        if how == "strict" and not math.isfinite(norm):
            raise Refused(RuntimeError, "is non-finite, so it cannot be clipped")  # torch's own
        seen = self.seen if isinstance(self.seen, torch.Tensor) else torch.tensor(norm, dtype=torch.float64)
        close = {torch.float64: 1e-12, torch.float32: 1e-5}.get(seen.dtype, 2e-2)
        right = math.isclose(float(seen), norm, rel_tol=close) or (not seen.isfinite() and not math.isfinite(norm))
        assert right, f"clip found a norm of {seen}, expected {norm}"
        coefficient = torch.clamp(max_norm / (seen + 1e-6), max=1.0)
        for gradient in gradients:
            if isinstance(gradient, Gradient):
                gradient.scale(float(coefficient))
            else:
                gradient.mul_(coefficient)
        return seen

    def _norm(self, gradient: torch.Tensor | Gradient) -> float:
        if isinstance(gradient, Gradient):
            return math.sqrt(gradient.square_sum())
        return float(torch.linalg.vector_norm(gradient))  # in its own dtype

    def drop_grad(self, param: int) -> None:
        self.param(param).grad = None
        if (row := self.row(param)) is not None:
            row.gradient = None

    def drop_all(self) -> None:
        for position in range(len(self.params)):
            self.drop_grad(position)

    def put_aside(self, param: int) -> None:
        row, gradient = self.row(param), self.gradient(self.param(param))
        if row is not None and isinstance(gradient, Gradient) and not gradient.used:
            row.aside = gradient
            self.kept.add(id(row.param))
            self.drop_grad(param)

    def put_back(self, param: int) -> torch.Tensor | None:
        row = self.row(param)
        if row is None or id(row.param) not in self.kept:
            return None
        self.kept.remove(id(row.param))
        self.drop_grad(param)
        row.gradient, row.aside = row.aside, None
        if row.gradient is None:
            raise Refused(StandInError, "this gradient was dropped")
        return self.read_norm(param)

    def set_grad(self, param: int, data: int, bad: bool, wide: bool) -> None:
        self.drop_grad(param)
        self.param(param).grad = gradient_by_hand(self.param(param), data, bad, wide)

    def mul_grad(self, param: int, factor: float, as_tensor: bool) -> None:
        gradient = self.gradient(self.param(param))
        number = torch.tensor(factor) if as_tensor else factor
        if isinstance(gradient, Gradient):
            gradient.scale(float(number))
        elif gradient is not None:
            gradient.mul_(number)

    def div_grad(self, param: int, factor: float, as_tensor: bool) -> None:
        gradient = self.gradient(self.param(param))
        number = torch.tensor(factor) if as_tensor else factor
        if isinstance(gradient, Gradient):
            gradient.scale(1.0 / float(number))
        elif gradient is not None:
            gradient.div_(number)

    def add_grad(self, param: int, data: int, alpha: float, wide: bool) -> None:
        tensor, gradient = self.param(param), self.gradient(self.param(param))
        other = noise(tensor, data).to(torch.float32 if wide else tensor.dtype)
        if isinstance(gradient, Gradient):
            self.opt.gather(self.opt.rows[id(tensor)], other if alpha == 1 else other * alpha)
        elif gradient is not None:
            gradient.add_(other, alpha=alpha)

    def zero_one(self, param: int) -> None:
        gradient = self.gradient(self.param(param))
        if isinstance(gradient, Gradient):
            self.opt.set_zero(self.opt.rows[id(self.param(param))])
        elif gradient is not None:
            gradient.zero_()

    def read_grad(self, param: int) -> torch.Tensor | None:
        if self.param(param).requires_grad:
            self.opt.manage([own for own in self.opt.params() if own is self.param(param)])
        row, gradient = self.row(param), self.gradient(self.param(param))
        if row is None:
            raise Refused(ValueError, "grad() expects a trainable parameter")
        if isinstance(gradient, Gradient):
            return None if gradient.used else gradient.read().view(row.param.shape)
        return None if gradient is None else gradient.float()

    def copy_grad(self, param: int) -> torch.Tensor | None:
        gradient = self.gradient(self.param(param))
        if isinstance(gradient, Gradient):
            return None if gradient.used else gradient.read().view(self.param(param).shape).to(self.param(param).dtype)
        return gradient

    def read_norm(self, param: int) -> torch.Tensor | None:
        gradient = self.gradient(self.param(param))
        if isinstance(gradient, Gradient):
            return torch.tensor(math.sqrt(gradient.square_sum()), dtype=torch.float64)
        return None if gradient is None else gradient.norm()

    def refused(self, param: int, how: str) -> None:
        if isinstance(self.gradient(self.param(param)), Gradient):
            raise Refused(StandInError, "which have left for the host")

    # -- between steps -----------------------------------------------------------------------------------------

    def change(self, group: int, key: str, value: Any) -> None:
        self.opt.groups[group % len(self.opt.groups)].update(self.choice.hyper({key: value}))

    def schedule(self) -> None:
        for group in self.opt.groups:
            group["lr"] = group["lr"] * 0.9

    def tensor_lr(self, group: int, lr: float) -> None:
        self.change(group, "lr", torch.tensor(lr))

    def edit_state(self, param: int) -> None:
        row = self.row(param)
        if row is not None and row.shown:
            edit(row.moments)
        elif row is None and (state := self.opt.waiting.get(id(self.param(param)))):
            edit(state)

    def freeze(self, param: int) -> None:
        self.param(param).requires_grad_(False)

    def unfreeze(self, param: int) -> None:
        self.param(param).requires_grad_(True)

    def add_group(self, hyper: dict[str, Any]) -> None:
        held = {id(param) for param in self.opt.params()}
        if new := [param for param in self.params if id(param) not in held]:
            self.opt.groups.append({**self.choice.hyper(hyper), "params": new})
            self.opt.manage([param for param in new if param.requires_grad])

    def load_weights(self, data: int) -> None:
        weights = {name: half_edited(value, data) for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(weights)
        for param in self.params:
            self.opt.was_written(param)

    def edit(self, param: int, data: int) -> None:
        with torch.no_grad():
            self.param(param).copy_(half_edited(self.param(param), data))
        self.opt.was_written(self.param(param))

    def edit_data(self, param: int, data: int, refresh: bool) -> None:
        self.param(param).data.copy_(half_edited(self.param(param), data))
        if refresh:
            self.refresh()

    def refresh(self) -> None:
        self.opt.refresh()

    def save(self) -> None:
        self.files.append(self.opt.save())

    def load(self, which: int) -> None:
        if self.files:
            self.opt.load(self.files[which % len(self.files)])

    def load_damaged(self, damage: str) -> None:
        saved = self.opt.save()
        if damage in ("groups", "lr") or saved["states"]:
            raise Refused(ValueError, damage)
        self.opt.load(saved)

    def reload(self, options: dict[str, Any]) -> None:
        saved = self.opt.save()
        self.end()
        self.kept.clear()
        self.opt = self.build([{"params": group["params"]} for group in self.opt.groups], options)
        self.opt.load(saved)

    def switch_update(self, update: str, delay_after: int) -> None:
        self.opt.flush()
        self.opt.delay_after = delay_after if update == "delayed" else None

    def flush(self) -> None:
        self.opt.flush()

    def save_run(self, how: str, optimizer_first: bool) -> Any:
        positions = {id(param): position for position, param in enumerate(self.params)}
        saved = self.opt.save()
        self.run = {
            "optimizer": saved,
            "direct": how == "direct",
            "model": [param.detach().clone() for param in self.params],
            "groups": [[positions[id(param)] for param in group["params"]] for group in self.opt.groups],
            "trainable": [param.requires_grad for param in self.params],
        }
        return saved["delayed"]

    def resume(
        self, options: dict[str, Any], optimizer_first: bool, frozen_as_saved: bool, hand_over: str | None
    ) -> None:
        if self.run is None:
            return
        self.end()
        self.kept.clear()
        self.model = build_model(self.program)
        self.params = list(self.model.parameters())
        for param, trainable in zip(self.params, self.run["trainable"], strict=True) if frozen_as_saved else ():
            param.requires_grad_(trainable)
        groups, saved = self.run["groups"], self.run["optimizer"]
        if not self.run["direct"]:
            saved = copy.deepcopy(saved)
        self.opt = self.build([{"params": [self.params[i] for i in group]} for group in groups], options)
        if optimizer_first:
            self.opt.load(saved)
        for param, value in zip(self.params, self.run["model"], strict=True):
            with torch.no_grad():
                param.copy_(value)
            self.opt.was_written(param)
        if not optimizer_first:
            self.opt.load(saved)

    def delete_state(self, param: int, how: str) -> None:
        self.opt.delete_state(self.param(param))

    def evaluate(self, data: int, skip: int) -> Any:
        with torch.no_grad():
            return losses_of(self.model, data, self.program.width, skip)

    def copy_model(self) -> list[torch.Tensor]:
        return [param.detach() for param in self.params]

    def hand_over(self) -> None:
        pass

    def take_back(self) -> None:
        pass

    def check(self) -> None:
        pass
