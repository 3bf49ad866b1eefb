"""Runs a model's micro-batch on fake tensors, and writes down what it does, layer by layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.hooks import RemovableHandle

from zofftk.ranks.slices import is_sliced, local_of
from zofftk.virtual.device_memory import DeviceMemory, Storages
from zofftk.virtual.durations import Durations
from zofftk.virtual.events import (
    BlockId,
    Event,
    Freed,
    Gradient,
    ParamId,
    Part,
    Parts,
    Read,
    Spent,
    Taken,
)
from zofftk.virtual.layer_stack import LayerStack
from zofftk.virtual.program import Loss, ModelProgram, leaves
from zofftk.virtual.repeating import FEW, NotRepeatedError, check_repeats


class _Line(DeviceMemory):
    """A line that tells the recorder of every block."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def allocate(self, nbytes: int) -> int:
        block = super().allocate(nbytes)
        self._recorder.taken(block, nbytes)
        return block

    def free(self, block: int) -> None:
        super().free(block)
        self._recorder.freed(block)


class Recorder:
    """The parts so far; the last one is open."""

    def __init__(self) -> None:
        self.parts: Parts = {}
        self._ids: dict[int, BlockId] = {}
        self.begin(Part("before"))

    def begin(self, part: Part) -> None:
        self._part, self._events = part, self.parts.setdefault(part, [])
        self._number = 0

    def spent(self, phase: str, flops: int, ns: int) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, Spent) and last.phase == phase:
            self._events[-1] = Spent(phase, last.flops + flops, last.ns + ns)
        else:
            self._events.append(Spent(phase, flops, ns))

    def taken(self, block: int, nbytes: int) -> None:
        self._ids[block] = BlockId(self._part, self._number)
        self._number += 1
        self._events.append(Taken(self._ids[block], nbytes))

    def freed(self, block: int) -> None:
        self._events.append(Freed(self._ids[block]))

    def note(self, event: Event) -> None:
        self._events.append(event)

    def id_of(self, block: int) -> BlockId:
        return self._ids[block]


def record(model: nn.Module, stack: LayerStack, loss: Loss, fake: FakeTensorMode, durations: Durations) -> Parts:
    """What one micro-batch of `model` does, whose layers are those in `stack`.

    Raises NotRepeatedError where it leaves memory behind, which the next one would find.
    """
    recorder = Recorder()
    storages = Storages(line := _Line(recorder))
    params = {id(param): param_id(name, stack.prefix) for name, param in model.named_parameters()}
    names = {local_of(param).untyped_storage()._cdata: params[id(param)] for param in model.parameters()}
    seen: set[ParamId] = set()

    def reads(tensor: torch.Tensor) -> None:
        param = names.get(tensor.untyped_storage()._cdata)
        if param is not None and param not in seen:
            seen.add(param)
            recorder.note(Read(param))

    def gradient(param: torch.Tensor) -> None:
        assert param.grad is not None
        grad = local_of(param.grad)
        placements = param.grad.placements if is_sliced(param.grad) else ()  # type: ignore[attr-defined]
        block = storages.block_of(grad)
        assert block is not None
        place = tuple(grad.shape), tuple(grad.stride()), int(grad.storage_offset())
        recorder.note(Gradient(params[id(param)], recorder.id_of(block), grad.dtype, *place, placements))
        param.grad = None

    program = ModelProgram(model, loss, fake, storages, durations, recorder.spent, reads)
    hooks = [param.register_post_accumulate_grad_hook(gradient) for param in program.params.values()]
    hooks += _mark_parts(stack.layers, recorder)
    try:
        program.micro_batch()
    finally:
        program.end()
        for hook in hooks:
            hook.remove()
    if line.live_bytes:
        raise NotRepeatedError(f"a micro-batch leaves {line.live_bytes} bytes behind")
    return recorder.parts


def record_few(
    model: nn.Module,
    stack: LayerStack,
    loss: Loss,
    fake: FakeTensorMode,
    durations: Durations,
    before: Callable[[Loss], None] = lambda loss: None,
) -> Parts:
    """What one micro-batch of `model` with its first `FEW` layers does, to be stretched; `before` is called first.

    Raises NotRepeatedError where the layers do not repeat.
    """
    recorded = []
    for number in (FEW, FEW + 1):
        with stack.first(number):
            before(loss)
            recorded.append(record(model, stack, loss, fake, durations))
    check_repeats(recorded[0], recorded[1], FEW)
    return recorded[0]


def param_id(name: str, prefix: str) -> ParamId:
    """`prefix` is the path of the stack: `blocks.`, where a layer's parameter is `blocks.3.mlp.up.weight`."""
    number, _, own = name[len(prefix) :].partition(".")
    return ParamId(int(number), own) if name.startswith(prefix) and number.isdecimal() else ParamId(-1, name)


def _mark_parts(stack: nn.ModuleList, recorder: Recorder) -> list[RemovableHandle]:
    """A part begins where a layer is entered, and where the gradient of what it has returned is complete."""
    last = len(stack) - 1
    handles = []
    for number, layer in enumerate(stack):

        def enter(_: nn.Module, args: object, kwargs: object, number: int = number) -> None:
            if in_backward():  # a recomputation
                return
            if number == 0:
                _at_gradient((args, kwargs), recorder, Part("after"))
            recorder.begin(Part("forward", number))

        def leave(_: nn.Module, args: object, output: object, number: int = number) -> None:
            if in_backward():
                return
            _at_gradient(output, recorder, Part("backward", number))
            if number == last:
                recorder.begin(Part("between"))

        handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(layer.register_forward_hook(leave))
    return handles


def _at_gradient(values: object, recorder: Recorder, part: Part) -> None:
    for tensor in leaves(values):
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: recorder.begin(part))
            return


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
