"""Every wait of the schedule over ranks is needed: without it the race check fails, naming two operations."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

import zofftk
from tests.rank_processes import run_ranks
from tests.small_gpt import build, loss_of
from zofftk.device.clock import RaceError
from zofftk.device.emulated import EmulatedDevice

# Kind: the operation that must not go on without it, and the one it waits for.
WAITS = {
    "arrived in wire": ("statistics", "down"),
    "arrived norms": ("norm", "down: norms"),
    "counted": ("down", "statistics"),
    "finish": ("refresh", "adam"),
    "gathered norms": ("down: norms", "all-gather: norms"),
    "norms on the device": ("all-gather: norms", "up: norms"),
    "own norms": ("up: norms", "norm: own blocks"),
    "packed": ("reduce-scatter", "pack|zero"),
    "reduced": ("down", "reduce-scatter"),
    "sent": ("all-gather", "up"),
    "slot for compute": ("pack|zero", "reduce-scatter"),
    "slot for up": ("up", "all-gather"),
    "summed": ("down", "sum"),
    "updated": ("up", "adam"),
    "wait for gradients": ("presence|norm", "down: norms|norm"),
    "wait for ranks": ("words", "down: words"),
    "wait for values": ("copy back", "all-gather"),
    "word on the device": ("all-gather: words", "up: word"),
    "word told": ("up: word", "all-gather: words"),
    "words there": ("down: words", "all-gather: words"),
}


class ForgetsAWait(EmulatedDevice):
    """The race clock does not hear of the waits of one kind; the streams do wait, for the sake of the other rank. The
    first race is kept and not raised, for the same reason."""

    def __init__(self, lost, **options):
        super().__init__(**options)
        self.lost, self.seen, self.race = lost, set(), None
        check = self.clock.operation

        def noted(*args, **buffers):
            try:
                check(*args, **buffers)
            except RaceError as error:
                self.race = self.race or str(error)

        self.clock.operation = noted

    def wait(self, stream, event, why):
        if self._is_heard(why):
            super().wait(stream, event, why)
        else:
            self._wait(stream, event, why)

    def synchronize(self, event, why):
        if self._is_heard(why):
            super().synchronize(event, why)
        else:
            self._synchronize(event, why)

    def _is_heard(self, why):
        self.seen.add(kind := why.partition(":")[0])
        return kind != self.lost


def train(device, rank, **options):
    """Steps that come by every wait: more buckets than slots, accumulation, new weights in between."""
    model = build(torch.bfloat16)
    opt = zofftk.OffloadAdamW(
        model.parameters(), bucket_bytes=32 * 1024, staging_slots=2, device=device, threads=1, **options
    )
    for step in range(2):
        for micro in range(1 + rank):
            loss_of(model, step + 10 * micro).backward()
        opt.step()
        opt.zero_grad()
        opt.flush()  # what is late must not be written over
        with torch.no_grad():
            model.norm.weight.fill_(1.0)
        loss_of(model, step + 20).backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
        opt.step()  # on zeros: nothing comes down in between
        opt.zero_grad()
        loss_of(model, step + 30).backward()
        opt.zero_grad()  # dropped: what comes next overwrites it, unused
    opt.close()
    return [p.detach().clone() for p in model.parameters()]


def test_every_wait_is_needed():
    def work(rank):
        found = {}
        for lost in (None, *WAITS):
            device = ForgetsAWait(lost if rank == 0 else None)
            train(device, rank)
            found[lost] = device.race
            if lost is None:
                assert device.seen == set(WAITS)
        return found

    lacking, whole = run_ranks(2, work)
    assert set(whole.values()) == {None}
    assert lacking.pop(None) is None
    for lost, race in lacking.items():
        later, earlier = WAITS[lost]
        assert race, f"nothing fails without the wait '{lost}'"
        assert re.match(rf"'({later})\b.*, which '({earlier})\b.* without having waited for it", race), (lost, race)


def test_with_all_waits_nothing_fails_under_delays_and_poison():
    def work(rank):
        for seed in range(2):
            for options in ({}, {"update": "delayed", "delay_after": 1}, {"reduce_dtype": torch.float32}):
                calm = train(EmulatedDevice(), rank, **options)
                device = EmulatedDevice(delays=2 * seed + rank, max_delay_ms=0.3, poison=True)
                for p, q in zip(train(device, rank, **options), calm, strict=True):
                    assert torch.equal(p, q)
                    assert p.isfinite().all()
        dist.barrier()

    run_ranks(2, work)
