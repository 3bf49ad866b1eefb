"""Hugging Face `Trainer` with the optimizer in it: clipping, accumulation, checkpoints, best-model reload."""

from __future__ import annotations

import copy
import math
import os

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file  # noqa: E402

import zofftk  # noqa: E402
from tests.compare import assert_same_bits  # noqa: E402
from tests.rank_processes import run_ranks  # noqa: E402
from tests.shadow import Shadow  # noqa: E402
from zofftk.hf import offload_optimizer  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_threads_left")
VOCAB = 89


class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.randint(1, VOCAB, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class ThreeAndFour(torch.nn.Module):
    """Every gradient is 3 and 4, so that the norm is 5."""

    def __init__(self):
        super().__init__()
        self.p, self.q = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, labels):
        return {"loss": (3 * self.p + 4 * self.q).sum()}


def gpt2(dtype=torch.float32):
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1
    )
    config.loss_type = "ForCausalLM"
    return transformers.GPT2LMHeadModel(config).to(dtype)


def arguments(folder, **changes):
    options = {"max_steps": 4, "per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 1e-2}
    options |= {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "weight_decay": 0.1}
    return transformers.TrainingArguments(str(folder), **options | changes)


def build(model, args, form="instance", **extra):
    """A trainer, and the optimizer it will use."""
    datasets = {"train_dataset": Words(), "eval_dataset": Words()}
    if form == "instance":
        opt = zofftk.OffloadAdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1)
        return transformers.Trainer(model, args, optimizers=(opt, None), **datasets, **extra), opt
    trainer = transformers.Trainer(model, args, optimizer_cls_and_kwargs=offload_optimizer(args), **datasets, **extra)
    return trainer, trainer.create_optimizer()


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def assert_same_training(model, opt, other_model, other_opt):
    for (name, p), q in zip(model.named_parameters(), other_model.parameters(), strict=True):
        assert_same_bits(p.detach(), q.detach(), name)
        for key, value in opt.state[p].items():
            assert_same_bits(value, other_opt.state[q][key], f"{key} of {name}")


@pytest.mark.parametrize("form", ["instance", "class"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b05_trains_as_torchs_adamw(tmp_path, form, dtype):
    """Step by step on the same gradients, clipped by the trainer; in fp32 the whole run is close to torch's."""
    model = gpt2(dtype)
    plain = copy.deepcopy(model)
    args = arguments(tmp_path, optim="adamw_torch", max_grad_norm=0.1)
    trainer, opt = build(model, args, form)
    assert type(opt) is zofftk.OffloadAdamW
    assert [group["weight_decay"] for group in opt.param_groups] == ([0.1] if form == "instance" else [0.1, 0.0])
    shadow = Shadow(opt)
    trainer.train()
    assert len(shadow.grads) == 4
    for grads in shadow.grads:
        assert math.hypot(*(float(g.norm()) for g in grads.values())) == pytest.approx(0.1, rel=1e-5)
    groups = [{**group, "params": _twins(group["params"], model, plain)} for group in opt.param_groups]
    reference = transformers.Trainer(
        plain, args, train_dataset=Words(), optimizers=(torch.optim.AdamW(groups, lr=args.learning_rate), None)
    )
    reference.train()
    near = 1e-4 if dtype == torch.float32 else 0.05  # torch has no fp32 master of bf16 parameters
    assert logged(trainer, "grad_norm") == pytest.approx(logged(reference, "grad_norm"), rel=near)
    assert logged(trainer, "loss") == pytest.approx(logged(reference, "loss"), rel=near)
    assert logged(trainer, "learning_rate") == logged(reference, "learning_rate") != []
    if dtype == torch.float32:
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=name)
    opt.close()


def _twins(params, model, plain):
    names = {p: name for name, p in model.named_parameters()}
    return [plain.get_parameter(names[p]) for p in params]


@pytest.mark.parametrize(
    ("clip", "expected"),
    [({}, (0.06, 0.08)), ({"max_grad_norm": 0.0}, (0.3, 0.4)), ({"max_grad_norm": 10.0}, (0.3, 0.4))],
)
def test_b21_the_trainers_clipping_clips_and_its_norm_is_right(tmp_path, clip, expected):
    """Without a word about it the trainer clips to 1.0, on `p.grad`."""
    model = ThreeAndFour()
    trainer, opt = build(model, arguments(tmp_path, max_steps=1, **clip))
    trainer.train()
    assert opt.state[model.p]["exp_avg"].item() == pytest.approx(expected[0], rel=1e-5)
    assert opt.state[model.q]["exp_avg"].item() == pytest.approx(expected[1], rel=1e-5)
    assert logged(trainer, "grad_norm") == pytest.approx([5.0])
    opt.close()


def test_b12_accumulation_is_one_large_batch(tmp_path):
    """The last update of the epoch gets what is left: 8 batches of 2 by 3 are 3 updates."""
    model, model_of_large = gpt2(), gpt2()
    epoch = {"max_steps": -1, "num_train_epochs": 1, "lr_scheduler_type": "constant"}
    trainer, opt = build(model, arguments(tmp_path, gradient_accumulation_steps=3, **epoch))
    large, opt_of_large = build(model_of_large, arguments(tmp_path, per_device_train_batch_size=6, **epoch))
    for module in (*model.modules(), *model_of_large.modules()):
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    trainer.train()
    large.train()
    assert {int(state["step"]) for state in opt.state.values()} == {3}
    assert logged(trainer, "grad_norm") == pytest.approx(logged(large, "grad_norm"), rel=1e-4)
    for (name, p), q in zip(model.named_parameters(), model_of_large.parameters(), strict=True):
        torch.testing.assert_close(
            opt.state[p]["master"], opt_of_large.state[q]["master"], rtol=1e-4, atol=1e-5, msg=name
        )
    opt.close()
    opt_of_large.close()


class HandsOver(transformers.TrainerCallback):
    """Over ranks, the trainer puts DistributedDataParallel around the model before it begins."""

    trainer: transformers.Trainer

    def on_train_begin(self, args, state, control, **kwargs):
        zofftk.offload(self.trainer.model_wrapped, self.trainer.optimizer.optimizer)


def test_two_ranks_train_as_torchs_adamw_on_two(tmp_path):
    def trained(rank, hands_over):
        torch.manual_seed(0)
        model, callback = gpt2(), HandsOver()
        args = arguments(tmp_path / str(rank))
        if hands_over:
            callback.trainer, opt = build(model, args, "class", callbacks=[callback])
            callback.trainer.train()
            opt.close()
            return logged(callback.trainer, "grad_norm"), model
        trainer = transformers.Trainer(model, args, train_dataset=Words())
        trainer.train()
        return logged(trainer, "grad_norm"), model

    def work(rank):
        as_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
        os.environ.update({name: str(value) for name, value in as_torchrun.items()})
        (norms, model), (expected, other) = trained(rank, True), trained(rank, False)
        assert norms == pytest.approx(expected, rel=1e-4)
        for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4, msg=name)

    run_ranks(2, work)


@pytest.mark.parametrize("form", ["instance", "class"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, form, dtype):
    saves = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    whole_model, model = gpt2(dtype), gpt2(dtype)
    whole, whole_opt = build(whole_model, arguments(tmp_path, **saves), form)
    whole.train()
    resumed, opt = build(model, arguments(tmp_path, **saves), form)
    shadow = Shadow(opt)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(shadow.grads) == 2
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert_same_training(model, opt, whole_model, whole_opt)
    opt.close()
    whole_opt.close()


@pytest.mark.parametrize("handed_over", [False, True])
@pytest.mark.parametrize("only_model", [False, True])
def test_b49_best_model_reload_and_resume(tmp_path, only_model, handed_over):
    saves = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    saves |= {"load_best_model_at_end": True, "metric_for_best_model": "chosen", "save_only_model": only_model}
    args = arguments(tmp_path, **saves, greater_is_better=True)
    model = gpt2(torch.bfloat16)
    trainer, opt = build(model, args, callbacks=[SecondIsBest()])
    handle = zofftk.offload(model, opt) if handed_over else None
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    best, last = (load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors") for step in (2, 4))
    assert not torch.equal(best["transformer.wte.weight"], last["transformer.wte.weight"])
    assert_same_weights(model, best)
    assert (tmp_path / "checkpoint-2" / "optimizer.pt").exists() != only_model

    new_model = gpt2(torch.bfloat16)
    new_trainer, new_opt = build(new_model, args, callbacks=[SecondIsBest()])
    for again, its_model, its_opt in [(trainer, model, opt), (new_trainer, new_model, new_opt)]:
        shadow = Shadow(its_opt)
        starts = []
        hook = its_opt.register_step_pre_hook(
            lambda *_, m=its_model, s=starts: s.append({name: p.detach().clone() for name, p in m.named_parameters()})
        )
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        hook.remove()
        assert len(shadow.grads) == 2  # each step from the weights in the model and the states, as the shadow has them
        for name, start in starts[0].items():
            assert_same_bits(start, best[name], name)
        assert_same_weights(its_model, best)
        steps = {int(state["step"]) for state in its_opt.state.values()}
        assert steps == ({4} if not only_model else {6} if again is trainer else {2})
        if not only_model:
            resumed = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
            for name, weight in resumed.items():
                assert_same_bits(weight, last[name], name)
    if handle:
        handle.remove()
    opt.close()
    new_opt.close()


def assert_same_weights(model, saved):
    for name, p in model.named_parameters():
        assert_same_bits(p.detach(), saved[name], name)


class SecondIsBest(transformers.TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_chosen"] = float(state.global_step == 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_have_the_same_bits(tmp_path, reentrant):
    model, other = gpt2(), gpt2()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    trainer, opt = build(model, arguments(tmp_path))
    trainer.train()
    plain, plain_opt = build(other, arguments(tmp_path))  # seeds dropout again
    plain.train()
    assert_same_training(model, opt, other, plain_opt)
    opt.close()
    plain_opt.close()
