"""The line, from a gradient that backward has just produced to the parameter it has changed.

    gradient -> bucket -> pack -> down -> norm and clip -> CPU update -> up -> copy back

During backward (`take`): a parameter's gradient waits until its bucket is full; the bucket is then packed into a
staging slot on *compute*, and *down* copies the slot to the host while backward goes on. The host keeps one wire
buffer per bucket. A second gradient before the update first adds what is on the wire to an fp32 total.

At the step (`step`): buckets that are not full leave too; *host* adds up the statistics that came with them; the main
thread waits for that one value, because the clip coefficient needs every gradient. Then, bucket by bucket, the first
layers first: *host* updates the fp32 states in one pass and writes the new value over the gradient on the wire, *up*
copies it into a staging slot, and *compute* copies it into the parameters (`way_up`), while *host* is already at the
next bucket. With `early`, `step` returns at once, and a parameter lands when it is read.

Who may touch what: a staging slot belongs to one bucket from `acquire` to the event it is released with. The wire
belongs to *down* until the gradient has arrived, then to *host*, then to *up*; the next gradient may overwrite it
because its pack follows, on *compute*, the copy back that waited for *up*. The engine starts no thread and reads no
clock, and looks at a value only through the device.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from zofftk import clipping, gradients, update
from zofftk.config import OffloadConfig
from zofftk.deferred_interrupts import interrupts_deferred
from zofftk.device.base import COMPUTE, HOST, Device
from zofftk.device.closing import close_when_gone
from zofftk.host_state import HostBucket, HostSegment, allocate_segment
from zofftk.inside_backward import AtStep, InsideBackward
from zofftk.layout import ParamSpec, build_layout, default_bucket_bytes
from zofftk.managed import Gathered, Managed, Update
from zofftk.policies import Delayed, Policy, make_policy, take_kept
from zofftk.ranks import unlike
from zofftk.ranks.one import ADD, DROP, NORM, STEP, OneRank, Ranks
from zofftk.ranks.slices import is_cut, local_of
from zofftk.rules.base import Hyper, Rule
from zofftk.staging import StagingRing
from zofftk.threads import usable_threads
from zofftk.totals import Totals
from zofftk.way_up import WayUp

if TYPE_CHECKING:
    from zofftk.ranks.tensor_parallel import TensorParallel


class Engine:
    """See the module. Parameters are known by their index, in the order they were added."""

    def __init__(self, config: OffloadConfig, device: Device, rule: Rule, ranks: Ranks | None = None) -> None:
        self.device = device
        self.config = config
        self.rule = rule  # whose name updates have on the host stream
        self.threads = config.threads or usable_threads()
        self.managed: list[Managed] = []
        self.segments: list[HostSegment] = []
        self.buckets: list[HostBucket] = []
        self.ring = StagingRing(device, config.staging_slots)
        self.ranks = ranks or OneRank(device)
        self.tensor_parallel: TensorParallel | None = None
        self.way_up = WayUp(device, self.ranks, self.ring, self.managed)
        self.totals = Totals(device, config.wire_dtype, self.threads)
        self.inbox: list[tuple[int, torch.Tensor]] = []  # from the hooks, see `hooks`
        self.outstanding = bytearray()  # by index: a gradient is in the inbox or gathered
        self.renew: Callable[[int], None] = lambda index: None  # have another stand-in for what comes
        self._lock = threading.RLock()  # backwards in several threads may deliver at once
        self._norm_is_known, self._has_met = False, True  # met: none has come since a step or drop of all
        self.policies = [make_policy(config.update, config.delay_after)]  # the last one is in use
        self.loss_scale = 1.0  # what gradients are too large by; changes only between two sets of gradients
        self.inside = AtStep()
        if config.backwards_per_step == 1 and self.ranks.size == 1:
            self.inside = InsideBackward(device, self.ring, self.managed, self.policies)
        close_when_gone(self.way_up, device, (self.segments, self.ring.slots))

    @property
    def policy(self) -> Policy:
        return self.policies[-1]

    def add(self, tensors: Sequence[torch.Tensor], names: Sequence[str], states: Iterable[str]) -> list[Managed]:
        """Take over parameters: lay them out, allocate their host memory with these moments, copy the masters."""
        if not tensors:
            return []
        self.land_all()
        if self.buckets and self.ranks.size > 1:
            self.meet(ADD)  # an open round would end with other buckets than the same round on another rank
        self.ranks.join(tensors, names)
        is_first = self.tensor_parallel is None or self.tensor_parallel.join(tensors, names)
        first = len(self.managed)
        wires = [self.config.wire_dtype or tensor.dtype for tensor in tensors]
        specs = [
            ParamSpec(i, local_of(tensor).numel(), str(wire), wire.itemsize)
            for i, (tensor, wire) in enumerate(zip(tensors, wires, strict=True), first)
        ]
        layout = build_layout(specs, self.config.bucket_bytes or default_bucket_bytes(specs), self.ranks.size)
        self.ring.reserve(*layout.slot_size(self.ranks.packed_as(torch.uint8).itemsize))
        segment = allocate_segment(self.device, layout, len(self.buckets), states, self.ranks.rank)
        if isinstance(self.policy, Delayed):
            segment.have_spares(self.device)
        self.segments.append(segment)
        self.buckets += segment.buckets
        self.ranks.add(segment.buckets)
        buckets_of = segment.buckets_of_params()
        for i, (tensor, name, wire) in enumerate(zip(tensors, names, wires, strict=True), first):
            is_copy = not is_first and not is_cut(tensor)
            self.managed.append(Managed(i, tensor, name, segment, buckets_of[i], wire=wire, is_copy=is_copy))
        self.outstanding.extend(bytes(len(tensors)))
        self._norms = self.device.buffer("norms", len(self.managed), torch.float64, "host", zero=True)
        for bucket in segment.buckets:
            own = [self.managed[piece.param].local for piece in bucket.own.pieces]
            self.device.load(f"load: {bucket.label}", bucket.own, own, bucket.master)
        return self.managed[first:]

    # -- during backward ---------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Take what the hooks have put into the inbox."""
        while self.inbox:
            with self._lock, interrupts_deferred():
                taken = self.inbox[:]
                self.inside.enter([index for index, _ in taken])
                del self.inbox[: len(taken)]  # a hook in another thread may have added to it in between
                for index, grad in taken:
                    managed = self.managed[index]
                    if managed.gathered is not Gathered.LIVE:
                        self._gather(managed, grad)
                    elif self.take(index, grad):
                        self.renew(index)

    def take(self, index: int, grad: torch.Tensor) -> bool:
        """`grad` is all of the gradient, and the engine's own; says whether something gathered was dropped for it."""
        with self._lock:
            managed = self.managed[index]
            drops = managed.gathered is Gathered.LIVE
            if drops:
                self.forget(index)
            self._gather(managed, grad)
            return drops

    def add_gradient(self, index: int, grad: torch.Tensor) -> None:
        """`grad` comes on top of what was gathered of the parameter; it stays the caller's."""
        self.deliver()
        with self._lock:
            self.inside.enter(())
            managed = self.managed[index]
            if managed.gathered is Gathered.SPENT:
                raise RuntimeError(
                    f"the gradient of {managed.name} was used by step() and is gone, so nothing can be added to it: "
                    "call zero_grad() before the next backward"
                )
            self._gather(managed, grad := managed.to_slice(grad))
            waiting = [bucket for bucket in managed.buckets if index in bucket.waiting]
            if waiting:
                own = grad.clone()
                for bucket in waiting:
                    bucket.waiting[index] = own

    def _gather(self, managed: Managed, grad: torch.Tensor) -> None:
        self.way_up.land_before_backward(managed)
        managed.comes_again |= managed.gathered is Gathered.LIVE or managed.round == self.ranks.rounds
        if managed.round == self.ranks.rounds or any(map(self.ranks.has_left, managed.buckets)):
            self.close_round()  # it fires again: a new backward, or a second use inside this one
        managed.round = self.ranks.rounds
        managed.gathered = Gathered.LIVE
        self.outstanding[managed.index] = 1
        self._norm_is_known, self._has_met = False, False
        if grad.dtype is not managed.wire and self.ranks.size == 1 and self.totals.takes(managed, grad):
            self.totals.add_wide(managed, grad)
            return
        for bucket in managed.buckets:
            bucket.waiting[managed.index] = grad
            if len(bucket.waiting) == len(bucket.params):
                for full in self.ranks.in_turn(bucket):
                    self._launch(full)
                    self.inside.exchange(full)

    def forget(self, index: int) -> None:
        """Drop what was gathered of a parameter."""
        self.deliver()
        managed = self.managed[index]
        if managed.gathered is not Gathered.LIVE:
            return
        if self.ranks.size > 1 and managed.round == self.ranks.rounds:
            self.close_round()  # what others have for this round is dropped with it
        self.forget_gathered(managed)

    def forget_gathered(self, managed: Managed) -> None:
        if managed.round >= 0:
            managed.dropped = max(managed.round + 1, self.ranks.met)
        managed.gathered = Gathered.NOTHING
        self.outstanding[managed.index] = 0
        self._norm_is_known = False
        managed.round = -1
        for bucket in managed.buckets:
            bucket.waiting.pop(managed.index, None)
            bucket.forget({managed.index})

    def close_round(self) -> None:
        """Send the buckets on their way that not all parameters of have arrived in."""
        self.deliver()
        for bucket in self.ranks.last_of_round():
            self._launch(bucket)

    def meet(self, does: float) -> None:
        """Take part in what others have begun, until all are at the same point; first what is on its way up."""
        if self.ranks.size > 1:
            self.way_up.land_all()
        self.close_round()
        while self.ranks.others_go_on(does, knows_norm=self._norm_is_known):
            for bucket in self.ranks.round_of_others():
                self._launch(bucket)
            self._norm_is_known = False
        self._has_met = does in (STEP, DROP)

    def _launch(self, bucket: HostBucket) -> None:
        if self.ranks.size > 1 and bucket is self.buckets[0]:
            unlike.forget_dropped(self)
        if bucket.on_wire or bucket.scale.keys() & bucket.waiting.keys():
            self.totals.add(bucket)
        bucket.zero -= bucket.waiting.keys()
        slot = self.ring.acquire(COMPUTE)
        data = slot.typed(bucket.bucket, self.ranks.packed_as(bucket.wire.tensor.dtype))
        present = self.ranks.fill(bucket, data)
        if bucket.waiting:
            placement = bucket.placement(bucket.waiting.keys())
            gradients = [bucket.waiting[piece.param] for piece in placement.pieces]
            self.device.pack(f"pack: {bucket.label}", placement, gradients, data, slot.square_sums)
            bucket.waiting.clear()
        bucket.arrived = self.ranks.bring_down(bucket, slot, data, present)
        bucket.sent.pop(bucket.wire, None)  # its pack came after the copy back of what was sent
        bucket.on_wire = present
        self.ring.release(slot, bucket.arrived)

    # -- what a stand-in asks ----------------------------------------------------------------------------------

    def name(self, index: int) -> str:
        return self.managed[index].name

    def copied_gradient(self, index: int) -> torch.Tensor | None:
        return gradients.copied(self, index)

    def scale_gradient(self, index: int, factor: float) -> None:
        """Multiply what was gathered of a parameter, by the same factor in all of its buckets."""
        with self._lock:
            self.take_norms()
            if (managed := self.managed[index]).gathered is Gathered.LIVE:
                managed.scale_gathered(factor)
            else:
                managed.square_sum *= factor**2  # what is left of a used gradient is its norm

    def change_loss_scale(self, value: float) -> None:
        """What has been gathered keeps its true value."""
        ratio, self.loss_scale = value / self.loss_scale, value
        if ratio != 1.0:
            self.close_round()
            for managed in self.managed:
                if managed.is_live:
                    managed.scale_gathered(ratio)
                    managed.square_sum /= ratio**2

    def zero_gradient(self, index: int) -> None:
        """Make it a true zero: the parameter takes part in the update with a gradient of zeros."""
        self.forget(index)
        managed = self.managed[index]
        managed.gathered = Gathered.LIVE
        self.outstanding[managed.index] = 1
        self._norm_is_known = False
        for bucket in managed.buckets:
            bucket.zero.add(index)

    def norm(self, index: int) -> float:
        self.take_norms()
        return math.sqrt(self.managed[index].gathered_square_sum)

    def take_norms(self, *, at_step: bool = False) -> None:
        """Fetch the square sum of every gradient from the host stream, once for each set of gradients."""
        self.meet(STEP if at_step else NORM)
        if self._norm_is_known and not self.ranks.has_news:
            return
        for bucket in self.buckets:
            if bucket.summed:
                self.totals.take_statistics(bucket)
        self.ranks.take_norms(self.segments, self.managed, self._norms)
        if self.tensor_parallel is not None:
            self.tensor_parallel.combine_norms(self.managed, self._norms)
        self.device.synchronize(self.device.record(HOST), "wait for gradients: the norm needs all of them")
        self.ranks.settle(self.managed, at_step=at_step)
        for managed, square_sum in zip(self.managed, self.device.value("norm", self._norms), strict=True):
            if managed.is_live:
                managed.square_sum = float(square_sum) * managed.buckets[0].average ** 2 / self.loss_scale**2
        self._norm_is_known = True

    # -- the update --------------------------------------------------------------------------------------------

    def step(self, hypers: Mapping[int, Hyper], *, early: bool = False) -> float | None:
        """Update every parameter that has a gradient; returns the norm of all gradients before clipping, if any are.

        Where the norm is not finite, nothing changes. With `early`, returns while the update runs; a parameter then
        lands before it is read.
        """
        self.land_all()
        self.ranks.update_with(hypers.values())
        self.take_norms(at_step=True)
        live = [managed for managed in self.managed if managed.is_live and managed.index in hypers]
        if not live:
            return None
        if not self.policy.is_late:
            self.exchange(take_kept(self.policy))  # loaded from a run that was late
        norm = clipping.global_norm([managed.gathered_square_sum for managed in live])
        updates = self._updates(live, hypers, norm, early=early) if math.isfinite(norm) else []
        self._has_met = math.isfinite(norm)  # else there still is what all have to drop
        self.inside.end_step(live)
        self.exchange(self.policy.exchange(updates), early=early)
        if not early and not self.policy.kept:
            self.finish()
        return norm

    def exchange(self, updates: Sequence[Update], *, early: bool = False) -> None:
        """Send the values of these updates to their parameters."""
        self.inside.land_all()
        self.way_up.add(updates)
        if not early:
            self.way_up.land_all()
            return
        for index in dict.fromkeys(index for updated in updates for index in sorted(updated.present)):
            self.way_up.watch(self.managed[index])

    def _updates(
        self, live: Sequence[Managed], hypers: Mapping[int, Hyper], norm: float, *, early: bool
    ) -> list[Update]:
        """Start the update of every bucket on the host; beside compute, it leaves a core."""
        coefficient = clipping.coefficient(norm, self.config.max_grad_norm) / self.loss_scale
        for managed in live:
            managed.step += 1
            managed.filled.update(hypers[managed.index].states)
            managed.square_sum = managed.gathered_square_sum  # what is left of the gradient once it is used
        threads = max(1, self.threads - 1) if early or self.policy.is_late else self.threads
        # Backward begins with the last layers, forward with the first: late values go up in the order they are awaited.
        step = -1 if not self.policy.is_late or (early and not self.inside.needs_each) else 1
        started = [self._update(bucket, hypers, coefficient, threads) for bucket in self.buckets[::step]]
        for managed in live:
            managed.gathered, managed.elsewhere, managed.round = Gathered.SPENT, False, -1
            self.outstanding[managed.index] = 0
        return [updated for updated in started if updated is not None]

    def _update(
        self, bucket: HostBucket, hypers: Mapping[int, Hyper], coefficient: float, threads: int
    ) -> Update | None:
        """One pass over the bucket's states on the host; None if no parameter of it has a gradient."""
        if bucket.summed and bucket.on_wire:
            self.totals.add(bucket)
        present = {i for i in bucket.on_wire | bucket.summed | bucket.zero if i in hypers}
        if not present:
            return None
        if (sent := bucket.sent.get(bucket.wire)) is not None:
            self.device.wait(HOST, sent, f"sent: {bucket.label} must have left before it is overwritten")
        task = update.apply(bucket, present, hypers, {i: self.managed[i].step for i in present}, coefficient, threads)
        reads = [bucket.total] if bucket.summed and bucket.total else []
        writes = [bucket.master, *bucket.moments.values(), bucket.wire]
        numel = sum(piece.numel for piece in bucket.pieces_of(present))
        self.device.host_task(f"{self.rule.name}: {bucket.label}", task, reads=reads, writes=writes, updates=numel)
        bucket.forget(present)
        return Update(bucket, present, bucket.wire, self.device.record(HOST))

    @property
    def is_exchanging(self) -> bool:
        return bool(self.way_up.in_flight or self.way_up.updated or self.policy.kept or self.inside.is_exchanging)

    def land_all(self) -> None:
        """All parameters are about to be read, or written to."""
        self.inside.land_all()
        self.way_up.land_all()

    def restart(self) -> None:
        """All gradients have been dropped, on every rank."""
        self.inside.restart()
        if self.ranks.size > 1:
            if not self._has_met:
                self.meet(DROP)  # or what is dropped here would be added to what comes next there
            for managed in self.managed:
                managed.dropped = 0
            for bucket in self.buckets:
                bucket.forget(set(bucket.params))

    def drop(self) -> None:
        """Nothing will arrive any more: parameters keep the values they have, and the other ranks are let go."""
        self.ranks.close()
        if self.tensor_parallel is not None:
            self.tensor_parallel.close()
        self.inside.drop()
        self.way_up.drop()

    def finish(self) -> None:
        """The caller may read the host states: nothing on the host stream is unfinished."""
        self.device.synchronize(self.device.record(HOST), "finish: the host's states must be final")
