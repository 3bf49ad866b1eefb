"""The machine that fits the parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zofftk.config import OffloadConfig
from zofftk.device.base import Device
from zofftk.device.emulated import EmulatedDevice


def device_for(params: Sequence[torch.Tensor], config: OffloadConfig) -> Device:
    """The machine that fits the parameters' place."""
    if not params:
        raise ValueError("the groups hold no parameters, expected at least one")
    devices = sorted({str(param.device) for param in params})
    if len(devices) > 1 or params[0].device.type not in ("cpu", "cuda"):
        raise ValueError(f"parameters are on {', '.join(devices)}: expected all on the CPU or all on one CUDA device")
    return open_device(params[0].device, config)


def open_device(device: torch.device, config: OffloadConfig) -> Device:
    """The machine for parameters on `device`."""
    if device.type == "cuda":
        from zofftk.device.cuda import open_cuda_device  # CuPy and Triton are loaded only for those who use them

        return open_cuda_device(device, keep_spans=config.trace, pinned_bytes=config.pinned_bytes)
    return EmulatedDevice(keep_spans=config.trace)
