"""What is run for the paper's Figures 8, 9 and 14 in small: which system, which model, which batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zofftk.baselines.prediction import TORCH_CPU_ADAM_NS
from zofftk.presets import PRESETS, TABLE_3


@dataclass(frozen=True)
class System:
    """`options` are those of our optimizer; None: everything stays on the device."""

    options: dict[str, Any] | None
    adam_ns_per_param: float | None = None  # of the host; None: the profile's

    @property
    def is_late(self) -> bool:
        return self.options is not None and "update" in self.options


LATE = {"update": "delayed", "delay_after": 0}
NONE, SLOW, SYNC = "no offload", "offload, torch's CPU Adam", "offload"
AT_STEP, INSIDE = "offload, delayed, at step", "offload, delayed, inside backward"
SYSTEMS = {
    NONE: System(None),
    SLOW: System({}, TORCH_CPU_ADAM_NS),
    SYNC: System({}),
    AT_STEP: System(LATE),
    INSIDE: System({**LATE, "backwards_per_step": 1}),
}

BATCHES = (1, 2, 4, 6, 8, 16, 32)  # Figure 14's
MOST_RESIDENT = 8  # the largest batch for which the paper has PyTorch: above it, a V100's memory is full
FIG_8, FIG_8_TOTAL = ("1b", "4b", "10b", "13b"), 32  # samples a step, where the paper has 512
FIG_9, FIG_9_BATCH = ("2b", "6b", "8b", "10b"), 8


@dataclass(frozen=True)
class Case:
    figure: str
    system: str
    preset: str
    micro_batch: int
    micro_batches: int = 1

    @property
    def x(self) -> tuple[str, int | str]:
        """The figure's axis, and the place on it."""
        return ("batch", self.micro_batch) if self.figure == "fig14" else ("params", self.preset.upper())

    @property
    def name(self) -> str:
        return f"{self.figure}, {self.preset.upper()}, {self.micro_batches} x {self.micro_batch}, {self.system}"


def all_cases() -> list[Case]:
    by_batch = [
        Case("fig14", system, "1b", batch)
        for batch in BATCHES
        for system in SYSTEMS
        if system != NONE or batch <= MOST_RESIDENT
    ]
    by_size = [Case("fig8", NONE, "1b", MOST_RESIDENT, FIG_8_TOTAL // MOST_RESIDENT)]
    for preset in FIG_8:
        micro_batch = TABLE_3[preset][2]
        by_size.append(Case("fig8", SYNC, preset, micro_batch, FIG_8_TOTAL // micro_batch))
    delayed = [Case("fig9", system, preset, FIG_9_BATCH) for preset in FIG_9 for system in (SYNC, AT_STEP, INSIDE)]
    assert {case.preset for case in by_batch + by_size + delayed} <= PRESETS.keys()
    return by_batch + by_size + delayed


def quick_cases() -> list[Case]:
    """One batch with all systems."""
    return [case for case in all_cases() if case.figure == "fig14" and case.micro_batch == 1]
