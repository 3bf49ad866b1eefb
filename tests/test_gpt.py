import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from zofftk.gpt import build_gpt
from zofftk.gpt_config import GPTConfig
from zofftk.presets import PRESETS, TABLE_3

SMALL = GPTConfig(layers=2, hidden=32, heads=4, vocab=50, seq=16)


def ids_of(config: GPTConfig, seed: int = 0) -> torch.Tensor:
    return torch.randint(config.vocab, (3, config.seq), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, layers=3, heads=1), PRESETS["tiny"].model])
def test_num_params_counts_the_model(config):
    model = build_gpt(config, seed=0, dtype=torch.float32)
    assert config.num_params == sum(param.numel() for param in model.parameters())


def test_matches_the_formulas_written_out():
    """Attention with explicit scores and mask, in fp64, from the model's own weights."""
    model = build_gpt(SMALL, seed=1, dtype=torch.float64)
    ids = ids_of(SMALL)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}

    def norm(x, name):
        return F.layer_norm(x, (SMALL.hidden,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    x = weights["tokens.weight"][ids] + weights["positions.weight"]
    width = SMALL.hidden // SMALL.heads
    later = torch.ones(SMALL.seq, SMALL.seq).triu(1).bool()
    for layer in range(SMALL.layers):
        name = f"blocks.{layer}"
        qkv = linear(norm(x, f"{name}.norm_attention"), f"{name}.attention.qkv")
        query, key, value = (part.transpose(1, 2) for part in qkv.unflatten(-1, (SMALL.heads, 3, width)).unbind(-2))
        scores = (query @ key.transpose(-1, -2) / math.sqrt(width)).masked_fill(later, -torch.inf)
        x = x + linear((scores.softmax(-1) @ value).transpose(1, 2).flatten(2), f"{name}.attention.out")
        up = linear(norm(x, f"{name}.norm_mlp"), f"{name}.mlp.up")
        gelu = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        x = x + linear(gelu, f"{name}.mlp.out")
    expected = norm(x, "norm") @ weights["tokens.weight"].T
    torch.testing.assert_close(model(ids), expected, rtol=1e-10, atol=1e-10)


def test_a_token_sees_only_those_before_it():
    model = build_gpt(SMALL, seed=0, dtype=torch.float32)
    ids = ids_of(SMALL)
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % SMALL.vocab
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_recomputation_changes_no_bit():
    ids = ids_of(SMALL)
    grads = []
    for recompute in (False, True):
        model = build_gpt(replace(SMALL, recompute=recompute), seed=0, dtype=torch.bfloat16)
        model(ids, ids.roll(-1, 1)).backward()
        grads.append([param.grad for param in model.parameters()])
    assert all(torch.equal(kept, recomputed) for kept, recomputed in zip(*grads, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_initial_values_are_the_rounded_fp32_ones_and_the_loss_is_that_of_guessing(dtype):
    exact = build_gpt(SMALL, seed=3, dtype=torch.float32)
    model = build_gpt(SMALL, seed=3, dtype=dtype)
    for (name, param), reference in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert torch.equal(param, reference.to(dtype)), name
    ids = ids_of(SMALL)
    assert model(ids, ids.roll(-1, 1)).item() == pytest.approx(math.log(SMALL.vocab), abs=0.1)


def test_the_seed_decides_the_weights():
    first, second = (build_gpt(SMALL, seed=seed, dtype=torch.float32) for seed in (0, 1))
    assert not torch.equal(first.tokens.weight, second.tokens.weight)
    residual = first.blocks[0].mlp.out.weight.std().item()
    assert residual == pytest.approx(0.02 / math.sqrt(2 * SMALL.layers), rel=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"layers": 0}, "layers must be at least 1, got 0"), ({"heads": 5}, "hidden must be a multiple of heads")],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


@pytest.mark.parametrize("name", TABLE_3)
def test_paper_presets_have_the_size_they_are_named_after(name):
    """The paper's sizes count the blocks' matrices only."""
    model = PRESETS[name].model
    assert 12 * model.layers * model.hidden**2 == pytest.approx(float(name[:-1]) * 1e9, rel=0.05)


def test_24m_has_about_24_million_parameters():
    assert PRESETS["24m"].model.num_params == pytest.approx(24e6, rel=0.05)
