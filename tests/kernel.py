"""Shared by the kernel's tests: calling it on torch tensors, and comparing elements."""

import torch

from zofftk import _cpu_adam

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def kernel_step(p, m, v, g, out=None, *, step=1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
                decoupled=True, grad_scale=1.0, threads=1, isa=""):  # fmt: skip
    _cpu_adam.adam_step(
        p.data_ptr(), m.data_ptr(), v.data_ptr(), g.data_ptr(), NAMES[g.dtype],
        0 if out is None else out.data_ptr(), "" if out is None else NAMES[out.dtype], p.numel(),
        step=step, lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay, decoupled=decoupled,
        grad_scale=grad_scale, threads=threads, isa=isa,
    )  # fmt: skip


def wild(n: int, seed: int) -> torch.Tensor:
    """float32 values of every size and kind: ordinary, subnormal, huge, zeros of both signs, infinities, NaN."""
    make = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31 - 1, (n,), generator=make, dtype=torch.int64).to(torch.int32)
    ordinary = torch.randn(n, generator=make) * 1e-2
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 1e-45, 3.4e38, 1e-30])
    pick = torch.randint(0, 10, (n,), generator=make)
    chosen = special[torch.randint(0, len(special), (n,), generator=make)]
    return torch.where(pick < 5, ordinary, torch.where(pick < 8, bits.view(torch.float32), chosen))
