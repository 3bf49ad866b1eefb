"""Element-by-element comparison that shows the first mismatches."""

from __future__ import annotations

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Equal dtype, shape and bits; NaN equals NaN."""
    assert actual.dtype == expected.dtype, (what, actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    bits = _BITS[actual.dtype.itemsize]
    a, b = actual.detach().contiguous().reshape(-1), expected.detach().contiguous().reshape(-1)
    if torch.equal(a.view(bits), b.view(bits)):
        return
    differ = (a.view(bits) != b.view(bits)) & ~(a.isnan() & b.isnan())
    if differ.any():
        first = differ.nonzero().flatten()[:5].tolist()
        shown = ", ".join(f"[{i}] {a[i].item()!r} for {b[i].item()!r}" for i in first)
        raise AssertionError(f"{what}: {int(differ.sum())} of {a.numel()} elements differ: {shown}")


def assert_within_ulp(got, expected, scale, ulps: float, what: str = "") -> None:
    """|got - expected| <= ulps * ulp(scale), element by element, in float32 ulp (2^-149 for subnormals)."""
    size = scale.double().abs().clamp(min=2.0**-126)
    unit = torch.exp2(torch.floor(torch.log2(size)) - 23)
    error = (got.double() - expected.double()).abs() / unit
    wrong = (error > ulps).flatten().nonzero().flatten()[:5].tolist()
    assert not wrong, f"{what}: first beyond {ulps} ulp " + ", ".join(
        f"[{i}] got {got.flatten()[i].item()!r} expected {expected.flatten()[i].item()!r} off {error.flatten()[i]:.2f}"
        for i in wrong
    )
