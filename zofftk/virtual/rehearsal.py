"""A virtual device with a program on it: what a schedule of training, the engine's or another, is tried on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zofftk.device.base import COMPUTE
from zofftk.device.virtual import VirtualDevice
from zofftk.ranks.slices import local_of, mesh_of
from zofftk.virtual.counts import Counts
from zofftk.virtual.device_memory import DeviceMemory, Storages
from zofftk.virtual.durations import Durations
from zofftk.virtual.events import Parts
from zofftk.virtual.fake_model import build_fake
from zofftk.virtual.layer_stack import LayerStack, find_layer_stack
from zofftk.virtual.program import Loss, ModelProgram, Program, trainable
from zofftk.virtual.recording import param_id, record_few
from zofftk.virtual.repeating import FEW, NotRepeatedError, stretch
from zofftk.virtual.replay import ReplayProgram


class Rehearsal:
    """`program` runs a micro-batch on `device`, in virtual time; `memory` is the line of what lives there.

    Parameters, buffers and what the device itself allocates are not on that line. `recorded` is what a few of its
    layers do, None where all are run: another rehearsal of the same micro-batch, with any number of these layers on a
    machine with the same durations of operations, may be given it instead of recording again.

    Args:
        build: makes the model; it is called under `torch.device("meta")`.
        loss: makes a batch, calls the model it is given, and returns the loss; it runs under fake tensors.
        durations: of the machine.
        dtype: of the floating-point parameters and buffers; None: as they are built.
        in_full: run every layer, also where they repeat.
        keep_spans: keep a span of every operation in the device's trace.
        recorded: what `record_few` has made of the same model, loss and durations, to save running them again.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        loss: Loss,
        durations: Durations,
        *,
        dtype: torch.dtype | None = None,
        in_full: bool = False,
        keep_spans: bool = False,
        recorded: Parts | None = None,
    ) -> None:
        self.durations = durations
        self.device = VirtualDevice(durations, keep_spans=keep_spans)
        self.memory = DeviceMemory()
        self.recorded: Parts | None = None
        self._flops = 0
        self._fake, self._storages = FakeTensorMode(), Storages(self.memory)
        self.model = build_fake(build, self._fake, dtype)
        kept = [*self.model.parameters(), *self.model.buffers()]
        self.model_bytes = sum(local_of(tensor).numel() * tensor.dtype.itemsize for tensor in kept)
        stack = None if in_full else find_layer_stack(self.model, least=FEW + 2)
        self.program = self._stretched(stack, loss, recorded) if stack else self._whole(loss)

    @property
    def is_stretched(self) -> bool:
        return self.recorded is not None

    def _spend(self, phase: str, flops: int, ns: int) -> None:
        self._flops += flops
        self.device.compute(phase, ns)

    def _try_out(self, loss: Loss) -> None:
        """DTensor tries each operation out where it meets it first, on tensors like the model's own."""
        if mesh_of(list(self.model.parameters())) is None:
            return
        unseen = Storages(DeviceMemory())
        program = ModelProgram(self.model, loss, self._fake, unseen, self.durations, lambda phase, flops, ns: None)
        program.micro_batch()
        program.end()
        self.model.zero_grad()

    def _whole(self, loss: Loss) -> Program:
        self._try_out(loss)
        return ModelProgram(self.model, loss, self._fake, self._storages, self.durations, self._spend)

    def _stretched(self, stack: LayerStack, loss: Loss, recorded: Parts | None) -> Program:
        """A few layers are run, and the events of all made of theirs; all are run where that cannot be."""
        try:
            recorded = recorded or record_few(self.model, stack, loss, self._fake, self.durations, self._try_out)
            parts = stretch(recorded, FEW, len(stack.layers))
        except (NotRepeatedError, IndexError):  # the latter: a model that counts on all its layers
            return self._whole(loss)
        self.recorded = recorded
        params = trainable(self.model)
        ids = {name: param_id(name, stack.prefix) for name in params}
        return ReplayProgram(parts, params, ids, self._fake, self._storages, self.durations, self._spend)

    def counts(self) -> Counts:
        """What has been spent so far."""
        device = self.device
        busy = Counter({stream: ns for stream, ns in device.busy_ns.items()})
        traffic = device.bytes_down, device.bytes_up, device.bytes_between
        return Counts(device.now_ns(COMPUTE), self._flops, *traffic, busy)
