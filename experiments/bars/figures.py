"""The figures that are predicted, by name."""

from __future__ import annotations

import importlib

from experiments.bars.bar import Bar, Counts

FIGURES = ("fig8", "fig9", "fig10", "fig11", "fig14")


def bars_of(figure: str, counts: Counts) -> list[Bar]:
    """Each figure is a module of experiments, which may have imported this one."""
    return importlib.import_module(f"experiments.{figure}").bars(counts)
