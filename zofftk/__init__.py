"""ZeRO-Offload for plain PyTorch: the optimizer lives on the host, the 16-bit parameters on the device."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zofftk import cpu_adam as cpu_adam
    from zofftk import cpu_lion as cpu_lion
    from zofftk import cpu_sgd as cpu_sgd
    from zofftk.config import OffloadConfig as OffloadConfig
    from zofftk.cpu_adamw import CPUAdamW as CPUAdamW
    from zofftk.loss_scale import LossScale as LossScale
    from zofftk.offload_adam import OffloadAdam as OffloadAdam
    from zofftk.offload_adam import OffloadAdamW as OffloadAdamW
    from zofftk.offload_lion import OffloadLion as OffloadLion
    from zofftk.offload_sgd import OffloadSGD as OffloadSGD
    from zofftk.overlap import offload as offload
    from zofftk.saving import load as load
    from zofftk.saving import save as save
    from zofftk.sharding.full import gather_full as gather_full
    from zofftk.sharding.saving import load_sharded as load_sharded
    from zofftk.sharding.saving import save_sharded as save_sharded

__all__ = [
    "CPUAdamW",
    "LossScale",
    "OffloadAdam",
    "OffloadAdamW",
    "OffloadConfig",
    "OffloadLion",
    "OffloadSGD",
    "cpu_adam",
    "cpu_lion",
    "cpu_sgd",
    "gather_full",
    "load",
    "load_sharded",
    "offload",
    "save",
    "save_sharded",
]

_HOMES = {
    "CPUAdamW": "zofftk.cpu_adamw",
    "LossScale": "zofftk.loss_scale",
    "OffloadAdam": "zofftk.offload_adam",
    "OffloadAdamW": "zofftk.offload_adam",
    "OffloadConfig": "zofftk.config",
    "OffloadLion": "zofftk.offload_lion",
    "OffloadSGD": "zofftk.offload_sgd",
    "gather_full": "zofftk.sharding.full",
    "load": "zofftk.saving",
    "load_sharded": "zofftk.sharding.saving",
    "offload": "zofftk.overlap",
    "save": "zofftk.saving",
    "save_sharded": "zofftk.sharding.saving",
}

try:
    __version__ = version("zofftk")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for, so that the import is light."""
    if name in ("cpu_adam", "cpu_lion", "cpu_sgd", "hf"):
        return importlib.import_module(f"zofftk.{name}")
    if name == "_cpu_adam":  # whoever writes `from zofftk import _cpu_adam` comes by here the first time
        return _load_kernel()
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'zofftk' has no attribute {name!r}")


def _load_kernel() -> Any:
    try:
        return importlib.import_module("zofftk._cpu_adam")
    except ImportError as error:
        raise ImportError(
            "zofftk's compiled CPU Adam (zofftk._cpu_adam) is missing: the C++ kernel was not built for this Python "
            f"({error}). Reinstall with a C++17 compiler and Python's headers present: "
            "in the checkout, pip install --force-reinstall --no-deps .",
            name="zofftk._cpu_adam",
        ) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
