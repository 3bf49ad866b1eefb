"""Models of transformers, unchanged, with random weights: every gradient arrives, every step is torch's."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

import zofftk  # noqa: E402
from tests.compare import assert_same_bits  # noqa: E402
from tests.shadow import Shadow  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_threads_left")
VOCAB, SMALL = 89, {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}


def gpt2():
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(vocab_size=VOCAB, intermediate_size=24, num_key_value_heads=1, **SMALL)
    return transformers.LlamaForCausalLM(config)


def bert():
    config = transformers.BertConfig(vocab_size=VOCAB, intermediate_size=24, max_position_embeddings=16, **SMALL)
    return transformers.BertForMaskedLM(config)


def t5():
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def mixtral():
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 1, "intermediate_size": 24}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=VOCAB, **SMALL, **experts))


def qwen2_moe():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 1}
    config = transformers.Qwen2MoeConfig(
        vocab_size=VOCAB, intermediate_size=24, shared_expert_intermediate_size=16, **SMALL, **experts
    )
    return transformers.Qwen2MoeForCausalLM(config)


def switch():
    """Its experts are modules of their own: one that gets no token has no gradient at all."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "num_sparse_encoder_layers": 1}
    config = transformers.SwitchTransformersConfig(
        vocab_size=VOCAB, num_experts=16, num_sparse_decoder_layers=1, decoder_start_token_id=0, **sizes
    )
    return transformers.SwitchTransformersForConditionalGeneration(config)


def batch(step):
    ids = torch.randint(1, VOCAB, (2, 4), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [gpt2, llama, bert, t5, mixtral, qwen2_moe, switch])
def test_three_steps(build, dtype):
    """The gradients are those of a plain copy, bit for bit; each step is torch's on fp32 masters, see `Shadow`."""
    model = build().to(dtype).train()
    model(**batch(0))  # Switch's router turns itself into fp32 here
    plain = copy.deepcopy(model)
    opt = zofftk.OffloadAdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1, bucket_bytes=4096)
    shadow = Shadow(opt)
    for step in range(3):
        plain.load_state_dict(model.state_dict())
        plain.zero_grad()
        for each in (plain, model):
            torch.manual_seed(step)  # dropout
            each(**batch(step)).loss.backward()
        delivered = {name: opt.grad(p) for name, p in model.named_parameters()}
        for name, p in plain.named_parameters():
            assert (delivered[name] is None) == (p.grad is None), name
            if p.grad is not None:
                assert_same_bits(delivered[name], p.grad.float(), name)
        opt.step()
        opt.zero_grad()
    assert len(shadow.grads) == 3
    _assert_idle_experts(build, model, shadow.grads)
    opt.close()


def _assert_idle_experts(build, model, grads):
    """The case is there: experts without a token in one step that had one in another."""
    if build is switch:
        names = [name for name, _ in model.named_parameters() if ".experts." in name]
        updates = [sum(repr(name) in each for each in grads) for name in names]
        assert {1, 2} & set(updates), updates
    elif build in (mixtral, qwen2_moe):
        names = [name for name, _ in model.named_parameters() if name.endswith("experts.down_proj")]
        assert len(names) == 2
        idle = torch.stack(
            [torch.stack([each[repr(name)].flatten(1).norm(dim=1) == 0 for name in names]) for each in grads]
        )
        assert (idle.any(0) & ~idle.all(0)).any(), idle


def test_a_model_that_converts_itself_after_the_optimizer_was_built_is_refused():
    model = switch().bfloat16()
    opt = zofftk.OffloadAdamW(model.named_parameters(), lr=1e-2)
    loss = model(**batch(0)).loss
    with pytest.raises(
        RuntimeError, match=r"router\.classifier\.weight' is torch.float32, which does not fit into the torch.bfloat16"
    ):
        loss.backward()
    opt.close()
