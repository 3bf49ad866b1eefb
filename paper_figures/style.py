"""How everything looks: colours for the colour-blind, hatches for print in grey, and the same bytes each time."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

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
DARK = "#7a2f00"  # what Vermilion has beside it
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
    "no offload": ("#bbbbbb", ""),
    "offload, torch's CPU Adam": (ORANGE, "xx"),
    "offload": (SKY, ".."),
    "offload, delayed, at step": (GREEN, "--"),
    "offload, delayed, inside backward": (BLUE, ""),
    "zofftk": (VERMILION, "++"),
    "zofftk without DPU": (VERMILION, "++"),
    "zofftk with DPU": (DARK, ""),
    "zofftk delayed": (DARK, ""),
    "zofftk with MP": (DARK, ".."),
}
_OTHERS = [(GREEN, "||"), (YELLOW, "oo"), (PURPLE, "**"), (ORANGE, "///"), (SKY, "++"), ("#999999", "xx")]
LINES = ("-", "--", "-.", ":")
FORMATS = ("png", "svg", "pdf")
PALETTE = 128  # colours of a picture
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
    """In all formats, without the time and the program in them, and small enough to be committed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for kind in FORMATS:
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, metadata=_METADATA[kind])
        file = path.with_suffix(f".{kind}")
        file.write_bytes(_SMALLER.get(kind, bytes)(buffer.getvalue()))
        written.append(file)
    return written


def _with_palette(png: bytes) -> bytes:
    buffer = io.BytesIO()
    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE)
    image.save(buffer, "png", optimize=True)
    return buffer.getvalue()


def _rounded(svg: bytes) -> bytes:
    """To hundredths of a point, without the comments that repeat each text. What is below 1 may be a scale."""
    return re.sub(rb"(?<![\d.])([1-9]\d*\.\d\d)\d+", rb"\1", re.sub(rb"\n *<!-- .*? -->", b"", svg))


_SMALLER: dict[str, Callable[[bytes], bytes]] = {"png": _with_palette, "svg": _rounded}
