"""How everything looks: colours for the colour-blind, hatches for print in grey, and the same bytes each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

# Okabe and Ito's, in an order whose neighbours also differ in grey.
BLACK, GREY = "#000000", "#6f6f6f"
BLUE, ORANGE, SKY, VERMILION, GREEN, YELLOW, PURPLE = (
    "#0072B2",
    "#E69F00",
    "#56B4E9",
    "#D55E00",
    "#009E73",
    "#F0E442",
    "#CC79A7",
)
# System: colour and hatch, the same in every figure.
SYSTEMS: dict[str, tuple[str, str]] = {
    "PyTorch": ("#bbbbbb", ""),
    "Megatron": (YELLOW, "//"),
    "ZeRO-2": (SKY, ".."),
    "SwapAdvisor": (PURPLE, "\\\\"),
    "L2L": (ORANGE, "xx"),
    "ZeRO-Offload": (BLUE, ""),
    "ZeRO-Offload with MP": (GREEN, "--"),
    "without DPU": (SKY, ".."),
    "with DPU": (BLUE, ""),
    "Offload + PT-CPU Adam": (ORANGE, "xx"),
    "Offload + CPU-Adam": (SKY, ".."),
    "Offload + CPU-Adam + DPU": (BLUE, ""),
    "CPU-Adam": (BLUE, ""),
    "PT-CPU": ("#bbbbbb", ""),
    "PT-GPU (L2L)": (GREEN, "--"),
    "zofftk": (VERMILION, "++"),
}
_OTHERS = [(GREEN, "||"), (YELLOW, "oo"), (PURPLE, "**"), (ORANGE, "///"), (SKY, "++"), ("#999999", "xx")]
LINES = ("-", "--", "-.", ":")
FORMATS = ("png", "svg", "pdf")
_METADATA = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
_RC: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "zofftk",  # an SVG file holds random names unless told otherwise
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "savefig.dpi": 150,
}


def styled():
    """Inside, figures look alike."""
    return matplotlib.rc_context(_RC)


def look_of(system: str, number: int = 0) -> tuple[str, str]:
    """Colour and hatch; `number` tells apart those that have none of their own."""
    return SYSTEMS.get(system, _OTHERS[number % len(_OTHERS)])


def save(figure: Figure, path: Path) -> list[Path]:
    """In all formats, without the time and the program in them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for kind in FORMATS:
        figure.savefig(path.with_suffix(f".{kind}"), metadata=_METADATA[kind])
        written.append(path.with_suffix(f".{kind}"))
    return written
