"""The mode that watches the model's own operations."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import zofftk
from tests.compare import assert_same_bits
from tests.small_gpt import build, loss_of
from zofftk.checked import CheckedAccess
from zofftk.device.clock import RaceError
from zofftk.device.emulated import EmulatedDevice

pytestmark = pytest.mark.usefixtures("no_threads_left")


class SlowUpdates(EmulatedDevice):
    def _host_task(self, label, task):
        super()._host_task(label, lambda: (time.sleep(0.005), task()))


def test_a_model_that_waits_for_its_modules_passes_and_keeps_its_bits():
    def train(checked):
        model = build(torch.bfloat16)
        opt = zofftk.OffloadAdamW(model.parameters(), lr=1e-2, bucket_bytes=16 * 1024, device=SlowUpdates())
        zofftk.offload(model, opt)
        for step in range(3):
            if checked:
                with CheckedAccess(opt):
                    loss_of(model, step).backward()
                    opt.step()
            else:
                loss_of(model, step).backward()
                opt.step()
            opt.zero_grad()
        opt.synchronize()
        opt.close()
        return model

    for p, q in zip(train(True).parameters(), train(False).parameters(), strict=True):
        assert_same_bits(p, q)


def test_reading_a_parameter_too_early_names_it_and_the_operation():
    class ReadsTheOther(nn.Module):
        def __init__(self):
            super().__init__()
            self.called, self.read = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
            self.through_module = True

        def forward(self, x):
            x = self.called(x)
            return self.read(x) if self.through_module else nn.functional.linear(x, self.read.weight)

    model = ReadsTheOther()
    opt = zofftk.OffloadAdamW(model.named_parameters(), lr=0.1, bucket_bytes=1, device=SlowUpdates())
    zofftk.offload(model, opt)
    with CheckedAccess(opt):
        for _ in range(2):
            model(torch.ones(1, 64)).sum().backward()
            opt.step()
            opt.zero_grad()
        model.through_module = False
        # A kernel of somebody's own does not ask torch for the weight it reads.
        early = pytest.raises(RaceError, match=r"of the model reads 'read.weight', whose new value has not landed")
        with early, torch._C.DisableTorchFunctionSubclass():
            model(torch.ones(1, 64))
    opt.synchronize()
    opt.close()


def test_writing_into_a_gradient_that_was_taken():
    kept = []

    class KeepsItsGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, p):
            return p * 2

        @staticmethod
        def backward(ctx, grad):
            kept.append(torch.ones_like(grad))
            return kept[-1][:]

    a, b = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    opt = zofftk.OffloadAdamW([("a", a), ("b", b)], lr=0.1)
    KeepsItsGradient.apply(a).sum().backward()
    (taken,) = (grad for _, grad in opt._engine.inbox)
    with CheckedAccess(opt), pytest.raises(RaceError, match="writes into the gradient of 'a', which is to be packed"):
        taken.zero_()
    opt.close()


def test_the_engines_own_eager_copies_are_not_the_models():
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    opt = zofftk.OffloadAdamW([weight])
    with CheckedAccess(opt):
        (weight * 2).sum().backward()
        opt.step()
    assert opt.state[weight]["step"] == 1
    opt.close()
