"""Kernels any trainer can use alone: Triton on CUDA tensors, eager torch on CPU tensors.

Importing this brings in torch and nothing else; Triton is imported when a kernel is first launched.
"""

from .copy_back import CopyBackPlan, copy_back
from .grad_stats import grad_stats
from .pack import PackPlan, pack
from .ranges import BLOCK_NUMEL, Range, Span, count_blocks

__all__ = [
    "BLOCK_NUMEL",
    "CopyBackPlan",
    "PackPlan",
    "Range",
    "Span",
    "copy_back",
    "count_blocks",
    "grad_stats",
    "pack",
]
