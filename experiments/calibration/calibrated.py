"""The free numbers with their values, and the machine that has them."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.calibration.free_numbers import FREE_NUMBERS, MACHINE, MICRO_BATCHES
from zofftk.profile import Profile, load_profile

FILE = Path(__file__).parent / f"{MACHINE}.toml"
FIXED_COUNTS = {"fig9": 1, "fig11": 1}
NOT_USED = {"gpu.half_intensity": 0.0}  # the exponent of an operation's work stands in its place


@dataclass(frozen=True)
class Calibration:
    values: Mapping[str, float]

    @property
    def profile(self) -> Profile:
        profile = load_profile(MACHINE)
        for name, value in {**NOT_USED, **self.values}.items():
            section, field = name.split(".")
            if hasattr(profile, section):
                changed = dataclasses.replace(getattr(profile, section), **{field: value})
                profile = dataclasses.replace(profile, **{section: changed})
        return profile

    @property
    def counts(self) -> dict[str, int]:
        """Micro-batches a step, by figure, where no total batch says it."""
        free = {name.removeprefix(MICRO_BATCHES): value for name, value in self.values.items()}
        return FIXED_COUNTS | {name: round(free[name]) for name in free if name.startswith("fig")}

    def but(self, changes: Mapping[str, float]) -> Calibration:
        return Calibration({**self.values, **changes})


def start() -> Calibration:
    """Datasheets and assumptions, nothing fitted."""
    return Calibration({number.name: number.start for number in FREE_NUMBERS})


def load(path: Path = FILE) -> Calibration:
    values = tomllib.loads(path.read_text())["values"]
    expected = {number.name for number in FREE_NUMBERS}
    if values.keys() != expected:
        raise ValueError(f"{path}: expected the values {sorted(expected)}, got {sorted(values)}")
    return Calibration(values)


def save(calibration: Calibration, path: Path = FILE) -> None:
    lines = ["# All free numbers of the predicted figures, written by `python -m experiments calibration`.", "[values]"]
    for number in FREE_NUMBERS:
        lines.append(f"# {number.meaning}; {number.unit}; from {number.start:g}; {number.fitted_on}")
        lines.append(f'"{number.name}" = {float(f"{calibration.values[number.name]:.4g}")!r}')
    path.write_text("\n".join([*lines, ""]))
