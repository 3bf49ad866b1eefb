"""The update on the GPU, as PyTorch had it in 2020: one kernel for each elementary operation.

Its time follows from the bytes that its kernels move. It is checked against the paper's Table 4 (PT-GPU: 0.10 s for a
billion parameters on a V100), not fitted to it.
"""

from __future__ import annotations

from zofftk.baselines.machine import Machine

# Of torch 1.5's Adam, fp32, read and written: m.mul_ 8, m.add_(g) 12, v.mul_ 8, v.addcmul_(g, g) 12, v.sqrt 8,
# division by the bias correction 8, add_(eps) 8, p.addcdiv_(m, denominator) 16.
ADAM_BYTES = 80
WIDEN_BYTES = 2 + 4  # a 16-bit gradient to fp32
NORM_BYTES = 4
SCALE_BYTES = 4 + 4  # by the clip coefficient and the loss scale
NARROW_BYTES = 4 + 2  # the fp32 parameter to 16 bits
STATES_BYTES = 12  # fp32 master, first and second moment


def update(machine: Machine, numel: int, largest: int) -> None:
    """Of so many parameters, one tensor after the other; the largest one's gradient in fp32 lies beside them."""
    machine.line.change("fp32 copy of a gradient", 4 * largest)
    machine.move("gradients to fp32, norm and scale", (WIDEN_BYTES + NORM_BYTES + SCALE_BYTES) * numel)
    machine.move("Adam", ADAM_BYTES * numel)
    machine.move("parameters to 16 bits", NARROW_BYTES * numel)
    machine.line.change("fp32 copy of a gradient", -4 * largest)
