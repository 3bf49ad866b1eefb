"""The rules of the optimizers in their plainest form: whole tensors, no buckets, no streams, no engine.

A gradient is what autograd delivers, in the dtype of the link; one that this would round stays in fp32, unless the
option wire_dtype asks for it. From the second delivery on it is the fp32 sum of them in order of arrival. A factor
multiplies what came before it: it stays a double, multiplied with other factors and the clip coefficient, until another
gradient of the same parameter arrives, which finds it applied in fp32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

BLOCK = 4096  # elements of one sum of squares, counted from the start of each parameter
LANES = 32  # partial sums inside a block


class Refused(Exception):
    """The documented error of an operation: its type and a part of its message."""

    def __init__(self, error: type[BaseException], text: str) -> None:
        super().__init__(error.__name__, text)
        self.error, self.text = error, text


def square_sum(values: torch.Tensor) -> float:
    """In fp64, block by block: element i goes to partial sum i mod 32; these are added in a tree."""
    total = 0.0
    for block in values.double().square().split(BLOCK) if values.numel() else ():
        lanes = np.zeros(-(-block.numel() // LANES) * LANES)
        lanes[: block.numel()] = block.numpy()
        with np.errstate(invalid="ignore"):
            lanes = np.add.accumulate(lanes.reshape(-1, LANES), axis=0)[-1]
            while len(lanes) > 1:
                lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        total += float(lanes[0])
    return total


@dataclass
class Gradient:
    """What has been gathered of one parameter for the coming step; `used` by it from then on."""

    values: torch.Tensor  # flat: in the link's dtype, fp32 from the second delivery on
    factor: float = 1.0
    used: bool = False
    is_zero: bool = False  # set to zero: an exact zero, which factors do not touch

    def square_sum(self) -> float:
        return square_sum(self.values) * self.factor**2

    def read(self) -> torch.Tensor:
        return self.values.float() * self.factor

    def add(self, values: torch.Tensor) -> None:
        if self.is_zero:
            self.values, self.is_zero = values, False
        else:
            self.values, self.factor = self.read() + values.float(), 1.0

    def scale(self, factor: float) -> None:
        if not self.is_zero:
            self.factor *= factor


@dataclass(eq=False)
class Row:
    """One parameter in the optimizer's care, its states flat and row-major."""

    param: torch.Tensor
    wire: torch.dtype
    master: torch.Tensor
    moments: dict[str, torch.Tensor] = field(default_factory=dict)  # by name, once there is something in them
    step: int = 0
    gradient: Gradient | None = None  # stands in p.grad; a real tensor there goes before it
    aside: Gradient | None = None  # somebody has kept it, and has put None into p.grad
    by_hand: bool = False  # a real tensor was in p.grad when this backward began
    shown: bool = False  # has an entry in the optimizer's state
    loaded: bool = False  # at the next step, weights count where the loaded master does not round to them
    written: bool = False  # torch has seen a write into the parameter since the last update
    late: torch.Tensor | None = None  # the value of its last update, which the parameter gets at the next step
    hook: Any = None

    def start_anew(self) -> None:
        self.moments.clear()
        self.step = 0

    def send_late(self) -> None:
        if self.late is not None:
            with torch.no_grad():
                self.param.copy_(self.late.view(self.param.shape))
            self.late, self.written, self.loaded = None, False, False

    def take_over(self) -> None:
        """Weights were written: a master whose rounded value still stands keeps its bits."""
        value = self.param.detach().reshape(-1)
        changed = self.master.to(self.wire).to(value.dtype) != value
        self.master[changed] = value[changed].float()
        self.written = self.loaded = False


@dataclass(eq=False)
class PlainOptimizer:
    """`groups` are dicts of hyper-parameters with `params`."""

    update: Callable[..., None]  # see `optimizers`
    groups: list[dict[str, Any]]
    max_grad_norm: float | None = None
    wire_dtype: torch.dtype | None = None
    delay_after: int | None = None  # None: never delayed
    steps: int = 0
    rows: dict[int, Row] = field(default_factory=dict)  # by id of the parameter, in the order they were taken over
    waiting: dict[int, dict[str, Any]] = field(default_factory=dict)  # states loaded for frozen parameters
    written: set[int] = field(default_factory=set)  # ids of those that were written to since
    skipped_steps: int = 0
    last_step_skipped: bool = False
    last_grad_norm: float | None = None

    def __post_init__(self) -> None:
        self.manage([param for param in self.params() if param.requires_grad])

    def params(self) -> list[torch.Tensor]:
        return [param for group in self.groups for param in group["params"]]

    def manage(self, params: list[torch.Tensor]) -> None:
        """Take over parameters; from then on the gradients of the trainable ones are taken as they are delivered."""
        for param in params:
            if id(param) not in self.rows:
                master = param.detach().reshape(-1).float().clone()
                row = Row(param, self.wire_dtype or param.dtype, master)
                self.rows[id(param)] = row
                if saved := self.waiting.pop(id(param), None):
                    self._load(row, saved)
                    row.written = id(param) in self.written
                if param.dtype == torch.float16:
                    param.grad_dtype = None  # p.grad takes gradients of any dtype
            row = self.rows[id(param)]
            if row.hook is None and param.requires_grad:
                row.hook = param.register_post_accumulate_grad_hook(lambda param, row=row: self._delivered(row))

    def was_written(self, param: torch.Tensor) -> None:
        """By an operation that torch has seen."""
        if id(param) in self.rows:
            self.rows[id(param)].written = True
        elif id(param) in self.waiting:
            self.written.add(id(param))

    def refresh(self) -> None:
        for row in self.rows.values():
            if row.late is None or (row.written and not row.loaded):
                row.late = None
                row.take_over()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._release()

    def _release(self) -> None:
        for row in self.rows.values():
            row.late = None
            row.gradient = None
            if row.hook is not None:
                row.hook.remove()
            if row.param.dtype == torch.float16 and (row.param.grad is None or row.param.grad.dtype == torch.float16):
                row.param.grad_dtype = torch.float16

    # -- gradients ---------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        for row in self.rows.values():
            row.by_hand = row.param.grad is not None

    def _delivered(self, row: Row) -> None:
        grad, row.param.grad = row.param.grad, None
        if row.by_hand:  # autograd has added to the tensor in p.grad: it is all of the gradient
            row.by_hand, row.gradient = False, None
        self.gather(row, grad)

    def gather(self, row: Row, grad: torch.Tensor) -> None:
        values = self.on_the_host(row, grad)
        row.aside = None
        if row.gradient is None:
            row.gradient = Gradient(values)
        elif row.gradient.used:
            raise Refused(RuntimeError, "call zero_grad() before the next backward")
        else:
            row.gradient.add(values)

    def on_the_host(self, row: Row, grad: torch.Tensor) -> torch.Tensor:
        is_exact = torch.promote_types(grad.dtype, row.wire) == row.wire
        return grad.detach().reshape(-1).to(row.wire if self.wire_dtype or is_exact else torch.float32).clone()

    def set_zero(self, row: Row) -> None:
        row.gradient = Gradient(torch.zeros_like(row.master), is_zero=True)

    def zero_grad(self, set_to_none: bool) -> None:
        self.manage([param for param in self.params() if param.requires_grad])
        for param in self.params():
            row = self.rows.get(id(param))
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()
            elif row is not None and row.gradient is not None:
                self.set_zero(row)
            if row is not None and set_to_none:
                row.gradient = row.aside = None

    # -- the step ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.manage([param for param in self.params() if param.grad is not None])
        rows = [row for row in self.rows.values() if any(row.param is param for param in self.params())]
        for param in self.params():
            row = self.rows.get(id(param))
            if row and param.grad is None and row.gradient is not None and row.gradient.used:
                raise Refused(RuntimeError, "Call zero_grad() after each step")
            if row and (param.grad is not None or row.gradient is None):
                row.aside = None  # this step goes by what is in p.grad: what is not there is dropped
        gradients: list[tuple[Row, Gradient]] = []
        for row in rows:
            if row.param.grad is not None:
                gradients.append((row, Gradient(self.on_the_host(row, row.param.grad))))
            elif row.gradient is not None:
                gradients.append((row, row.gradient))
        if not gradients:
            return
        self._check_writes()
        for row in self.rows.values():
            if row.step and not row.shown:
                row.start_anew()
            if row.late is None and (row.written or row.loaded):
                row.take_over()
        norm = self.last_grad_norm = math.sqrt(sum(gradient.square_sum() for _, gradient in gradients))
        self.last_step_skipped = not math.isfinite(norm)
        self.flush()
        self.steps += 1
        if self.last_step_skipped:
            self.skipped_steps += 1
            return
        coefficient = 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (norm + 1e-6))
        for row, gradient in gradients:
            self._update(row, gradient, coefficient)
            gradient.used = True
        for row in self.rows.values():
            row.shown = row.step > 0

    def _update(self, row: Row, gradient: Gradient, coefficient: float) -> None:
        group = next(group for group in self.groups if any(row.param is param for param in group["params"]))
        row.step += 1
        new = torch.empty(row.master.numel(), dtype=row.wire)
        options = {"step": row.step, "grad_scale": gradient.factor * coefficient, "threads": 1}
        self.update(row.master, row.moments, gradient.values, new, group, **options)
        row.late = new
        if self.delay_after is None or self.steps <= self.delay_after:
            row.send_late()

    def flush(self) -> None:
        """What is late is late no more."""
        self._check_writes()
        for row in self.rows.values():
            row.send_late()

    def _check_writes(self) -> None:
        """What was late when it was saved is held against no weights: these are the ones before."""
        late = [row for row in self.rows.values() if row.late is not None]
        for row in late:
            if row.loaded:
                row.written = row.loaded = False
        if any(row.written for row in late):
            raise Refused(RuntimeError, "was written to while a delayed update")

    # -- checkpoints -------------------------------------------------------------------------------------------

    def delete_state(self, param: torch.Tensor) -> None:
        row = self.rows.get(id(param))
        self.waiting.pop(id(param), None)
        if row is not None:
            row.shown = False

    def save(self) -> dict[str, Any]:
        """Groups without their parameters, and the state of each parameter that has one, by position."""
        states = {}
        for row in self.rows.values():
            if row.late is None and row.written and not row.loaded:
                row.take_over()
        for position, param in enumerate(self.params()):
            row = self.rows.get(id(param))
            if row is not None and row.shown:
                states[position] = {"step": row.step, "master": row.master, **row.moments}
            elif id(param) in self.waiting:
                states[position] = self.waiting[id(param)]
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.groups]
        sizes = [len(group["params"]) for group in self.groups]
        return copy.deepcopy({"groups": groups, "sizes": sizes, "states": states, "delayed": self._delayed()})

    def _delayed(self) -> dict[str, Any] | None:
        """Not of parameters that were written to, nor of those whose state was deleted."""
        rows = {position: self.rows.get(id(param)) for position, param in enumerate(self.params())}
        late = {position: row for position, row in rows.items() if row is not None and row.late is not None}
        if self.delay_after is None and not late:
            return None
        saved = [position for position, row in late.items() if row.shown and (row.loaded or not row.written)]
        return {"steps": self.steps, "late": saved}

    def load(self, saved: dict[str, Any]) -> None:
        if saved["sizes"] != [len(group["params"]) for group in self.groups]:
            raise Refused(ValueError, "the saved groups hold")
        for group, hyper in zip(self.groups, copy.deepcopy(saved["groups"]), strict=True):
            group.update(hyper)
        self.waiting, self.written = {}, set()
        late = [self.params()[position] for position in saved["delayed"]["late"]] if saved["delayed"] else []
        self.manage([param for param in self.params() if param.requires_grad or any(param is one for one in late)])
        for row in self.rows.values():
            row.late = None
        for position, param in enumerate(self.params()):
            state = saved["states"].get(position)
            row = self.rows.get(id(param))
            if row is None and state is not None:
                self.waiting[id(param)] = state
            elif row is not None and state is None:
                row.start_anew()
                row.master.copy_(param.detach().reshape(-1))
                row.shown = row.written = row.loaded = False
            elif row is not None:
                self._load(row, state)
        updates = max((row.step for row in self.rows.values()), default=0)
        self.steps = saved["delayed"]["steps"] if saved["delayed"] else updates
        for param in late:
            row = self.rows[id(param)]
            row.late = row.master.to(row.wire)

    def _load(self, row: Row, state: dict[str, Any]) -> None:
        row.master.copy_(state["master"])
        row.moments = {name: state[name].clone() for name in state if name not in ("step", "master")}
        row.step, row.shown = state["step"], True
        row.loaded = True
