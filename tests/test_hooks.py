"""What the gradient hook refuses."""

from __future__ import annotations

import pytest
import torch

import zofftk


@pytest.mark.parametrize(("before", "after"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_parameter_that_was_converted_after_the_optimizer_was_built(before, after):
    model = torch.nn.Linear(4, 4, bias=False, dtype=before)
    opt = zofftk.OffloadAdamW(model.named_parameters())
    model.to(after)
    with pytest.raises(
        RuntimeError, match=f"^'weight' was {before} on cpu when .* is {after} on cpu now: convert and move"
    ):
        model(torch.ones(4, dtype=after)).sum().backward()
    opt.close()
