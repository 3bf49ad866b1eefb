"""Models by name: small ones for a laptop, and the configurations of the ZeRO-Offload paper's Table 3."""

from dataclasses import dataclass

from zofftk.errors import InputError
from zofftk.gpt_config import GPTConfig


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model with the batch, length and learning rate it is trained with unless told otherwise."""

    model: GPTConfig
    batch_size: int
    steps: int
    lr: float


# Name: (layers, hidden size, batch per GPU), as Table 3 prints them.
TABLE_3 = {
    "1b": (20, 2048, 32),
    "2b": (40, 2048, 32),
    "4b": (64, 2304, 32),
    "6b": (53, 3072, 16),
    "8b": (72, 3072, 16),
    "10b": (50, 4096, 10),
    "11b": (55, 4096, 8),
    "12b": (60, 4096, 4),
    "13b": (65, 4096, 4),
    "15b": (78, 4096, 8),
    "20b": (25, 8192, 8),
    "40b": (50, 8192, 8),
    "60b": (75, 8192, 8),
    "70b": (69, 9216, 8),
}


def _from_table_3(layers: int, hidden: int, batch_size: int) -> Preset:
    # Heads, sequence length and vocabulary are not in the paper; these are GPT-2's and its release scripts'.
    model = GPTConfig(layers=layers, hidden=hidden, heads=32, vocab=50257, seq=1024, recompute=True)
    return Preset(model=model, batch_size=batch_size, steps=1000, lr=1.5e-4)


PRESETS: dict[str, Preset] = {
    "tiny": Preset(model=GPTConfig(layers=2, hidden=64, heads=4, vocab=256, seq=64), batch_size=4, steps=20, lr=1e-3),
    "demo": Preset(
        model=GPTConfig(layers=4, hidden=256, heads=4, vocab=4096, seq=128), batch_size=16, steps=250, lr=2e-3
    ),
    "24m": Preset(
        model=GPTConfig(layers=6, hidden=512, heads=8, vocab=8192, seq=256), batch_size=4, steps=500, lr=6e-4
    ),
} | {name: _from_table_3(*row) for name, row in TABLE_3.items()}


def find_preset(name: str) -> Preset:
    if name not in PRESETS:
        raise InputError(f"preset: expected one of {', '.join(PRESETS)}; got {name!r}")
    return PRESETS[name]
