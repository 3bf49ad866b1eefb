"""Between `step()` and its arrival, a new value is there for everyone who asks torch for it, and for no earlier."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import time

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zofftk
from tests.compare import assert_same_bits
from zofftk.device.emulated import EmulatedDevice

pytestmark = pytest.mark.usefixtures("no_threads_left")


class SlowUpdates(EmulatedDevice):
    """Every task of the host stream takes 4 ms longer, so nothing has landed when `step()` returns."""

    def _host_task(self, label, task):
        super()._host_task(label, lambda: (time.sleep(0.004), task()))


def stepped(hand_over=True, *, device=None):
    """A model after its first step, its new values under way where it was handed over."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    opt = zofftk.OffloadAdamW(model.named_parameters(), lr=0.1, bucket_bytes=1, device=device or SlowUpdates())
    if hand_over:
        zofftk.offload(model, opt)
    model(torch.ones(2, 8)).square().sum().backward()
    opt.step()
    return model, opt


@pytest.fixture(scope="module")
def new_values():
    model, opt = stepped(hand_over=False)
    opt.close()
    return [p.detach().clone() for p in model.parameters()]


def is_pending(param):
    return type(param) is not nn.Parameter


def _under_fake_mode(p):
    p.grad = None  # a mode of that kind looks at it too
    with FakeTensorMode(allow_non_fake_inputs=True):
        return p + 0


READERS = {
    "detach": lambda p: p.detach().clone(),
    "data": lambda p: p.data.clone(),
    "operation": lambda p: p + 0,
    "method": lambda p: p.clone(),
    "index": lambda p: torch.stack([row + 0 for row in p]),
    "dtype": lambda p: p.double().float(),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "foreach": lambda p: torch._foreach_mul([p], 1.0)[0],
    "list in keywords": lambda p: torch.stack(tensors=[p])[0],
    "address": lambda p: (p.data_ptr(), p.data.clone())[1],
    "storage": lambda p: torch.tensor(p.untyped_storage().tolist(), dtype=torch.uint8).view(torch.float32).view(8, 8),
    "deepcopy": lambda p: copy.deepcopy(p),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "print": lambda p: (repr(p), p.data.clone())[1],
    "vector": lambda p: nn.utils.parameters_to_vector([p]).view(8, 8),
    "moving average": lambda p: torch.zeros(8, 8).lerp_(p.data, 1.0),
    "function": lambda p: nn.functional.linear(torch.eye(8), p).t(),
    "einsum": lambda p: torch.einsum("ij->ij", p) + 0,
    "inference": torch.inference_mode()(lambda p: p.clone()),
    "as_subclass": lambda p: p.as_subclass(torch.Tensor).clone(),
    "unflatten": lambda p: p.unflatten(0, (2, 4)).reshape(8, 8).clone(),
    "fake mode": lambda p: (_under_fake_mode(p), p.detach().clone())[1],
    "module under vmap": lambda p: torch.func.vmap(lambda x: nn.functional.linear(x, p))(torch.eye(8)).t(),
    "jvp": lambda p: torch.func.jvp(lambda x: p * x, (torch.ones(8, 8),), (torch.ones(8, 8),))[0],
}


@pytest.mark.filterwarnings("ignore:`torch.jit")  # jvp uses it inside
@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_sees_the_new_value(reader, new_values):
    model, opt = stepped()
    weight = model[1].weight
    assert is_pending(weight)
    assert isinstance(weight, nn.Parameter)
    read = READERS[reader](weight)
    assert not is_pending(weight)
    assert_same_bits(torch.as_tensor(read).detach().clone(), new_values[2])
    opt.close()


def test_questions_that_leave_the_values_alone_do_not_wait():
    model, opt = stepped()
    weight = model[1].weight
    assert weight.shape == (8, 8)
    assert (weight.dtype, weight.device.type, weight.ndim, len(weight)) == (torch.float32, "cpu", 2, 8)
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.is_floating_point()
    assert torch.is_tensor(weight)
    assert weight.numel() == torch.numel(weight) == 64
    assert weight.grad.shape == weight.shape
    model.zero_grad()
    assert weight.grad is None
    opt.zero_grad()
    for param in model.parameters():
        hash(param)
        param.requires_grad_(True)
    model.eval()
    assert is_pending(weight)
    opt.close()
    assert not is_pending(weight)


def test_a_forward_that_reads_weights_before_it_calls_their_module(new_values):
    class ReadsFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            norm = self.layer.weight.norm() + self.layer.bias.norm()
            return self.layer(x) * norm

    def losses(hand_over):
        torch.manual_seed(0)
        model = ReadsFirst()
        opt = zofftk.OffloadAdamW(model.parameters(), lr=0.1, device=SlowUpdates())
        if hand_over:
            zofftk.offload(model, opt)
        losses = []
        for _ in range(4):
            loss = model(torch.ones(2, 8)).square().mean()
            losses.append(loss.detach())
            loss.backward()
            opt.step()
            opt.zero_grad()
        opt.close()
        return torch.stack(losses)

    assert_same_bits(losses(True), losses(False))


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: nn.init.constant_(m[1].weight, 0.25),
        lambda m: m[1].weight.data.__setitem__((0, 0), 5.0),
        lambda m: m.load_state_dict({name: value * 2 for name, value in m.state_dict().items()}),
        lambda m: nn.utils.vector_to_parameters(torch.arange(144.0), m.parameters()),
        lambda m: [torch.no_grad()(p.mul_)(0.5) for p in m.parameters()],
    ],
)
def test_an_edit_between_a_step_and_the_next_forward_is_made_on_the_new_values(edit):
    def train(hand_over):
        model, opt = stepped(hand_over)
        edit(model)
        opt.refresh()  # one of the edits goes through .data
        for _ in range(2):
            opt.zero_grad()
            model(torch.ones(2, 8)).square().sum().backward()
            opt.step()
        opt.close()
        return model

    for p, q in zip(train(True).parameters(), train(False).parameters(), strict=True):
        assert_same_bits(p, q)


def test_an_edit_that_torch_does_not_see_is_an_error_once():
    model, opt = stepped()
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        model[0].weight.fill_(1.0)
    with pytest.raises(RuntimeError, match=r"'0.weight' was written to after step\(\).*is lost: call synchronize"):
        opt.synchronize()
    opt.synchronize()
    assert_same_bits(model[0].weight.detach(), opt.state[model[0].weight]["master"])
    model(torch.ones(2, 8))
    opt.close()


def test_a_forward_that_torch_does_not_see_is_an_error():
    model, opt = stepped()
    opt.zero_grad()
    with torch._C.DisableTorchFunctionSubclass():
        loss = nn.functional.linear(torch.ones(1, 8), model[0].weight, model[0].bias).sum()
    with pytest.raises(RuntimeError, match=r"forward has used '0\.\w+' before its new value had arrived"):
        loss.backward()
    opt.synchronize()
    opt.close()


# -- copies of a model that was handed over ------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["pending", "gathered", "fresh"])
def test_a_model_can_be_copied_and_pickled(when, new_values):
    model, opt = stepped()
    if when != "pending":
        opt.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
    expected = [p.detach().clone() for p in model.parameters()]
    file = io.BytesIO()
    if when == "fresh":
        opt.zero_grad()
    twin = copy.deepcopy(model)
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    output = model(torch.ones(2, 8))
    for other in (twin, loaded):
        for p, q in zip(other.parameters(), expected, strict=True):
            assert type(p) is nn.Parameter
            assert_same_bits(p.detach(), q)
        assert_same_bits(other(torch.ones(2, 8)), output)
    opt.close()


def test_a_copied_tensor_has_the_gathered_gradient():
    tensor = torch.ones(3, requires_grad=True, dtype=torch.bfloat16)
    opt = zofftk.OffloadAdamW([tensor])
    (tensor * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert copy.deepcopy(tensor).grad.tolist() == [1.0, 2.0, 3.0]
    opt.step()
    assert copy.deepcopy(tensor).grad is None
    opt.close()


def test_averaged_models_see_the_new_values():
    def average(hand_over):
        model, opt = stepped(hand_over)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        for _ in range(3):
            opt.zero_grad()
            model(torch.ones(2, 8)).square().sum().backward()
            opt.step()
            averaged.update_parameters(model)
        opt.close()
        return averaged

    for p, q in zip(average(True).parameters(), average(False).parameters(), strict=True):
        assert_same_bits(p, q)


# -- lives that end ------------------------------------------------------------------------------------------------


def test_dropping_the_optimizer_leaves_the_new_values(new_values):
    model, opt = stepped()
    del opt
    gc.collect()
    for p, q in zip(model.parameters(), new_values, strict=True):
        assert_same_bits(p.detach(), q)


def test_dropping_everything_ends_the_threads():
    model, opt = stepped()
    del opt, model  # the fixture looks for threads


class Breaks(EmulatedDevice):
    """The update fails, after step() has returned."""

    def _host_task(self, label, task):
        def run():
            task()
            if label.startswith("adam"):
                time.sleep(0.05)
                raise OSError("bad memory")

        super()._host_task(label, run)


def test_after_a_fault_every_read_is_an_error_until_close():
    model, opt = stepped(device=Breaks())
    with pytest.raises(OSError, match="bad memory"):
        model(torch.ones(2, 8))
    for read in (lambda: model(torch.ones(2, 8)), lambda: model[0].weight + 1, model.state_dict):
        with pytest.raises(RuntimeError, match="stopped at an earlier fault: OSError: bad memory"):
            read()
    opt.close()
    assert not any(map(is_pending, model.parameters()))
    model(torch.ones(2, 8))


def test_a_faulty_optimizer_that_is_dropped_ends_its_threads():
    model, opt = stepped(device=Breaks())
    with pytest.raises(OSError, match="bad memory"):
        model(torch.ones(2, 8))
    del model, opt  # the fixture looks for threads


def test_another_thread_may_read(new_values):
    model, opt = stepped()
    seen = []
    threads = [threading.Thread(target=lambda p=p: seen.append(p.detach().clone())) for p in [model[1].weight] * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for value in seen:
        assert_same_bits(value, new_values[2])
    opt.close()


def test_an_interrupt_in_a_forward_leaves_a_model_that_goes_on():
    class Interrupts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            self.interrupt = False

        def forward(self, x):
            x = self.layers[0](x)
            if self.interrupt:
                raise KeyboardInterrupt
            return self.layers[1](x)

    def train(hand_over):
        torch.manual_seed(0)
        model = Interrupts()
        opt = zofftk.OffloadAdamW(model.parameters(), lr=0.1, bucket_bytes=1, device=SlowUpdates())
        if hand_over:
            zofftk.offload(model, opt)
        outputs = []
        for step in range(4):
            model.interrupt = step == 2
            try:
                model(torch.ones(2, 8)).square().sum().backward()
            except KeyboardInterrupt:
                outputs.append(model.layers[1](torch.ones(2, 8)).detach())
            opt.step()
            opt.zero_grad()
        opt.close()
        return torch.cat(outputs)

    assert_same_bits(train(True), train(False))


# -- more than one of everything -----------------------------------------------------------------------------------


def test_two_optimizers_on_one_model_and_handing_over_twice():
    def train(hand_over):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        opts = [zofftk.OffloadAdamW(part.parameters(), lr=0.1, device=SlowUpdates()) for part in model]
        handles = [zofftk.offload(model, opt) for opt in opts * 2] if hand_over else []
        for step in range(5):
            if step == 3 and handles:
                handles[0].remove()
                assert opts[0].overlaps
            model(torch.ones(2, 8)).square().sum().backward()
            for opt in opts:
                opt.step()
                opt.zero_grad()
        for opt in opts:
            opt.close()
        return model

    for p, q in zip(train(True).parameters(), train(False).parameters(), strict=True):
        assert_same_bits(p, q)


def test_parameters_of_other_classes():
    class Named(nn.Parameter):
        pass

    module = nn.Module()
    module.named, plain = Named(torch.ones(4)), torch.ones(4, requires_grad=True)
    named = module.named
    opt = zofftk.OffloadAdamW([named, plain], lr=0.1, weight_decay=0.0, device=SlowUpdates())
    zofftk.offload(module, opt)
    (named.sum() + plain.sum()).backward()
    opt.step()
    assert [type(p).__name__ for p in (named, plain)] == ["PendingNamed", "PendingTensor"]
    assert type(type(named)(torch.zeros(2))) is Named  # some libraries make others of the same type
    for p, cls in ((named, Named), (plain, torch.Tensor)):
        torch.testing.assert_close(p.detach(), torch.full((4,), 0.9))
        assert type(p) is cls
    opt.close()
