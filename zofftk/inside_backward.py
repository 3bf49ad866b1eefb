"""The exchange of a delayed update inside backward: a value goes up as soon as its parameter's gradient has left.

Right only where nothing reads the parameter again before `step`. The caller announces one backward a step; beyond that,
a parameter takes part only if, in the steps seen so far, its gradient came once, in a backward that was one graph task
(no second loss, no re-entrant recomputation) and let go of its graph. All others keep their exchange at the step. What
else has saved the old weights (`W.detach()` earlier in the graph) meets autograd's own error: their version has moved.

Source: ZeRO-Offload, section 5.2 (figure 6: parameters are swapped behind the gradients of the same backward).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch

from zofftk.device.base import Device
from zofftk.host_state import HostBucket
from zofftk.managed import Gathered, Managed
from zofftk.policies import Policy
from zofftk.ranks.one import OneRank
from zofftk.staging import StagingRing
from zofftk.way_up import WayUp

logger = logging.getLogger("zofftk")
_C: Any = torch._C
_OUTSIDE = -1  # the number of no graph task


class AtStep:
    """Nobody has announced anything: nothing is exchanged inside backward."""

    is_exchanging = False
    needs_each = False  # gradient as it comes, not several in one go

    def enter(self, coming: Collection[int]) -> None:
        """Gradients are about to be taken, those of `coming` afresh."""

    def exchange(self, bucket: HostBucket) -> None:
        """The gradients of the whole bucket have left."""

    def end_step(self, live: Sequence[Managed]) -> None:
        """Look at how the gradients of this step have come."""

    def restart(self) -> None:
        """No gradient is held."""

    def land_all(self) -> None:
        """All parameters are about to be read."""

    def drop(self) -> None:
        """Nothing will arrive any more."""


class InsideBackward(AtStep):
    """See the module. `policies` is the engine's list, whose last one is in use."""

    needs_each = True

    def __init__(self, device: Device, ring: StagingRing, managed: Sequence[Managed], policies: list[Policy]) -> None:
        self.way_up = WayUp(device, OneRank(device), ring, managed, kept_free=1)  # gradients always find a slot
        self._managed = managed
        self._policies = policies
        self._tasks: set[int] = set()  # graph tasks that have brought gradients since the last step
        self._exchanged = False  # since the last step
        self._has_told = False

    @property
    def is_exchanging(self) -> bool:
        return bool(self.way_up.in_flight)

    def land_all(self) -> None:
        self.way_up.land_all()

    def drop(self) -> None:
        self.way_up.drop()

    def enter(self, coming: Collection[int]) -> None:
        task = _C._current_graph_task_id()
        if task == _OUTSIDE or task in self._tasks:
            return
        if self._tasks and not self._holds_gradients(coming):
            self.restart()  # what the backward before has brought was dropped by hand
        if self._exchanged:
            raise RuntimeError(
                "another backward, or a re-entrant one inside the first, brings gradients before step(), after values "
                "were exchanged inside the first: backwards_per_step=1 announced a single one; leave that option out, "
                "or call step() or zero_grad() after each backward"
            )
        self._tasks.add(task)

    def _holds_gradients(self, coming: Collection[int]) -> bool:
        held = (one for one in self._managed if one.gathered is Gathered.LIVE and one.index not in coming)
        return any(one.tensor.grad is not None for one in held)

    def exchange(self, bucket: HostBucket) -> None:
        kept = self._policies[-1].kept
        if bucket not in kept or len(self._tasks) != 1 or _C._current_graph_task_id() not in self._tasks:
            return
        updated = [self._managed[index] for index in kept[bucket].present]
        if _C._autograd._get_current_graph_task_keep_graph():
            return  # for another backward, through these weights
        if any(one.comes_once is not True or one.comes_again or one.is_edited for one in updated):
            return
        if not self.way_up.has_room:
            if not self.way_up.in_flight:
                self._tell("with a single staging slot, which gradients need")
                return
            self.way_up.land_next()
        if not self._exchanged:
            # No forward waits for these values: they are there when backward returns, whether a step follows or not.
            torch.autograd.Variable._execution_engine.queue_callback(self.land_all)
        self._exchanged = True
        self.way_up.add([kept.pop(bucket)])

    def end_step(self, live: Sequence[Managed]) -> None:
        for managed in live:
            comes_once = len(self._tasks) <= 1 and not managed.comes_again  # 0: put into `p.grad` by hand
            if not comes_once and managed.comes_once is not False:
                self._tell(
                    f"wherever gradients come in more than one backward or part of one: {managed.name} is the first"
                )
            managed.comes_once = comes_once and managed.comes_once is not False
        self.restart()

    def restart(self) -> None:
        for managed in self._managed:
            managed.comes_again = False
        self._tasks.clear()
        self._exchanged = False

    def _tell(self, where: str) -> None:
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "delayed values are exchanged at step(), not inside backward as backwards_per_step=1 allows, %s", where
            )
