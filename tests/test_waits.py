"""Every wait of the engine is needed: without it the race check fails, naming two operations."""

from __future__ import annotations

import pytest
import torch

import zofftk
from tests.small_gpt import build, loss_of
from zofftk.device.clock import RaceError
from zofftk.device.emulated import EmulatedDevice

WAITS = {
    "arrived in wire": "sum",
    "arrived with statistics": "norm",
    "finish": "refresh",
    "packed": "down",
    "sent": "adam",
    "slot for compute": "pack",
    "slot for up": "up",
    "summed": "down",
    "updated": "up",
    "wait for gradients": "norm",
    "wait for values": "copy back",
}


class LosesAWait(EmulatedDevice):
    """Leaves out the waits of one kind, and lists the kinds it was asked for."""

    def __init__(self, lost: str | None) -> None:
        super().__init__()
        self.lost = lost
        self.seen: set[str] = set()

    def wait(self, stream, event, why):
        self.seen.add(kind := why.partition(":")[0])
        if kind != self.lost:
            super().wait(stream, event, why)

    def synchronize(self, event, why):
        self.seen.add(kind := why.partition(":")[0])
        if kind != self.lost:
            super().synchronize(event, why)


def train(device):
    """Two steps that come by every wait: more buckets than slots, accumulation, new weights in between."""
    model = build(torch.bfloat16)
    opt = zofftk.OffloadAdamW(model.parameters(), bucket_bytes=16 * 1024, staging_slots=2, device=device)
    for step in range(2):
        loss_of(model, step).backward()
        loss_of(model, step + 10).backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            model.norm.weight.fill_(1.0)
        loss_of(model, step + 20).backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
        opt.step()  # on zeros: nothing comes down in between
        opt.zero_grad()
    opt.close()


def test_with_all_waits_nothing_fails_and_these_are_all():
    device = LosesAWait(None)
    train(device)
    assert device.seen == set(WAITS)


@pytest.mark.parametrize("lost", sorted(WAITS))
def test_without_one_the_check_fails(lost):
    device = LosesAWait(lost)
    with pytest.raises(RaceError, match=rf"'{WAITS[lost]}.*without having waited"):
        train(device)
    device.close()
