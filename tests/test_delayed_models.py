"""The delayed update of models whose parameters are used more than once, or not at all, and of what happens between."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.compare import assert_same_bits
from tests.delayed_rule import Pair, each_delay, each_mode, each_mode_of_many_backwards, loss_of, mlp
from tests.small_gpt import build
from tests.small_gpt import loss_of as gpt_loss

pytestmark = pytest.mark.usefixtures("no_threads_left", "at_once")


class Shared(nn.Module):
    """Layers that are called more than once, tied weights, and parts that are recomputed in backward."""

    def __init__(self, reentrant: bool | None, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.first, self.twice, self.shared = nn.Linear(16, 33), nn.Linear(33, 33), nn.Linear(33, 33)
        self.head = nn.Linear(33, 33, bias=False)
        self.head.weight = self.twice.weight
        self.to(dtype)

    def recomputed(self, x: torch.Tensor) -> torch.Tensor:
        def layer(x):
            return torch.tanh(self.shared(x))

        return layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.recomputed(torch.tanh(self.first(x)))
        x = self.twice(torch.tanh(self.twice(x)))
        return self.head(self.recomputed(x))  # the shared layer is recomputed twice


@each_mode
@pytest.mark.parametrize(("dtype", "delay_after"), [(torch.bfloat16, 0), (torch.float32, 3)])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_tied_repeated_and_recomputed_layers(mode, delay_after, dtype, reentrant):
    pair = Pair(lambda: Shared(reentrant, dtype), mode, delay_after=delay_after, max_grad_norm=0.5)
    pair.train(loss_of, 7)
    pair.assert_same()
    pair.close()


@each_mode
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_gpt_with_a_tied_head_and_recomputed_blocks(mode, reentrant):
    def recomputing():
        model = build(torch.bfloat16)
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=reentrant)
        return model

    pair = Pair(recomputing, mode, max_grad_norm=0.5, bucket_bytes=16 * 1024)
    pair.train(gpt_loss, 4)
    pair.assert_same()
    pair.close()


# -- several backwards, and parameters without one -----------------------------------------------------------------


@each_mode_of_many_backwards
@pytest.mark.parametrize(("dtype", "delay_after"), [(torch.bfloat16, 0), (torch.float32, 3)])
def test_micro_batches_add_up_in_fp32(mode, delay_after, dtype):
    pair = Pair(lambda: mlp(dtype), mode, delay_after=delay_after, max_grad_norm=0.5)
    for step in range(9):
        for micro in range((2, 3, 1)[step % 3]):
            pair.backward(loss_of, 3 * step + micro)
        pair.step()
    pair.assert_same()
    pair.close()


@each_mode_of_many_backwards
def test_micro_batches_through_a_layer_that_is_recomputed_re_entrantly(mode):
    pair = Pair(lambda: Shared(True, torch.bfloat16), mode, max_grad_norm=0.5)
    for step in range(5):
        for micro in range(1 + step % 3):
            pair.backward(loss_of, 3 * step + micro)
        pair.step()
    pair.assert_same()
    pair.close()


class Routed(nn.Module):
    """Bit i of a step's number says whether layer i is used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.bfloat16()
        self.used = 15

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x)) if self.used >> i & 1 else x
        return x


def used_layers(step: int) -> int:
    return (0b1111, 0b0101, 0b1010, 0b0001, 0b0001, 0b1110)[step % 6]


def routed_loss(model: Routed, step: int) -> torch.Tensor:
    model.used = used_layers(step)
    return loss_of(model, step)


@each_mode
@pytest.mark.parametrize(("bucket_bytes", "delay_after"), [(1, 0), (1 << 20, 3)])
def test_b48_b53_a_parameter_that_a_step_does_not_use(mode, delay_after, bucket_bytes):
    """Its late update arrives with the others'; it is then left as it is."""
    pair = Pair(Routed, mode, delay_after=delay_after, max_grad_norm=0.5, bucket_bytes=bucket_bytes)
    for step in range(8):
        before = [layer.weight.detach().clone() for layer in pair.model.layers]
        pair.train(routed_loss, 1)
        in_either = used_layers(step) | used_layers(step - 1)
        for i, (layer, old) in enumerate(zip(pair.model.layers, before, strict=True)):
            if step and not in_either >> i & 1:
                assert_same_bits(layer.weight.detach(), old)
    pair.assert_same()
    pair.close()


@each_mode
def test_a_step_without_any_gradient_applies_nothing(mode):
    pair = Pair(mlp, mode)
    pair.train(loss_of, 2)
    before = [p.detach().clone() for p in pair.model.parameters()]
    pair.step()
    for p, old in zip(pair.model.parameters(), before, strict=True):
        assert_same_bits(p.detach(), old)
    pair.train(loss_of, 2)
    pair.assert_same()
    pair.close()


@each_mode
@each_delay
def test_freezing_unfreezing_and_adding_groups_while_an_update_is_late(mode, delay_after):
    def groups(model):
        return [{"params": [*model[0].parameters()]}, {"params": [*model[2].parameters()], "lr": 3e-2}]

    pair = Pair(mlp, mode, delay_after=delay_after, groups=groups, max_grad_norm=0.5)
    for step in range(10):
        for model, opt in ((pair.model, pair.opt), (pair.twin, pair.plain)):
            if step in (2, 6):
                model[0].weight.requires_grad_(step == 6)  # frozen while its update is late
            if step == 4:
                model[4].zero_grad()
                model[4].bias.requires_grad_(False)
                opt.add_param_group({"params": [*model[4].parameters()], "lr": 5e-3, "weight_decay": 0.0})
            if step == 8:
                model[4].bias.requires_grad_(True)
                opt.zero_grad()
        pair.train(loss_of, 1)
    pair.assert_same()
    pair.close()


def test_a_group_that_is_added_after_switching():
    pair = Pair(mlp, {}, groups=lambda model: [{"params": [*model[0].parameters()]}], update="synchronous")
    pair.opt.switch_update("delayed")
    for model, opt in ((pair.model, pair.opt), (pair.twin, pair.plain)):
        opt.add_param_group({"params": [*model[2].parameters()]})
    pair.train(loss_of, 4)
    pair.assert_same()
    pair.close()


# -- in between ----------------------------------------------------------------------------------------------------


def evaluated(pair):
    pair.model.eval()
    with torch.no_grad():
        assert_same_bits(loss_of(pair.model, 100), loss_of(pair.twin, 100))
    pair.model.train()


def copied(pair):
    twin = copy.deepcopy(pair.model)
    for p, q in zip(twin.parameters(), pair.twin.parameters(), strict=True):
        assert_same_bits(p.detach(), q.detach())
    assert_same_bits(loss_of(twin, 100).detach(), loss_of(pair.twin, 100).detach())


def inference(pair):
    with torch.inference_mode():
        assert_same_bits(loss_of(pair.model, 100).clone(), loss_of(pair.twin, 100))


def states_read(pair):
    late = {each[0] for each in pair.plain.late}
    for p, q in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
        state = pair.opt.state.get(p)
        if state and q not in late:
            assert_same_bits(state["master"].to(p.dtype), p.detach())
        if state:  # one update ahead
            assert state["step"] == pair.plain.state[q]["step"] + (q in late)


def model_state_read(pair):
    for a, b in zip(pair.model.state_dict().values(), pair.twin.state_dict().values(), strict=True):
        assert_same_bits(a, b)


BETWEEN = {
    "evaluation": evaluated,
    "inference mode": inference,
    "reading parameters": lambda pair: pair.assert_same_params(),
    "state_dict of the model": model_state_read,
    "state_dict of the optimizer": lambda pair: copy.deepcopy(pair.opt.state_dict()),
    "deepcopy": copied,
    "states": states_read,
    "synchronize": lambda pair: pair.opt.synchronize(),
    "report": lambda pair: pair.opt.report(),
    "gradients": lambda pair: [pair.opt.grad(p) for p in pair.model.parameters()],
}


@each_mode
def test_what_is_read_in_between_changes_nothing(mode):
    pair = Pair(mlp, mode, delay_after=1, max_grad_norm=0.5)
    for read in BETWEEN.values():
        pair.backward(loss_of)
        if "backwards_per_step" in mode:  # what was late has come
            pair.opt.synchronize()
            pair.plain.flush()
        read(pair)  # between backward and step
        pair.step()
        read(pair)
    pair.assert_same()
    pair.close()
