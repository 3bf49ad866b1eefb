"""Table 1 of the paper: GPU memory of the placements that reach the least traffic."""

from dataclasses import dataclass
from fractions import Fraction

from zofftk.dataflow.assumptions import PAPER
from zofftk.dataflow.graph import FWD_BWD, UPDATE
from zofftk.dataflow.optimum import Optimum
from zofftk.dataflow.placements import Placement

COLUMNS = (FWD_BWD, "p16", "g16", UPDATE)
# Bytes per parameter and reduction as the paper prints them, by what is on the CPU; only compared with, never shown as
# a result.
PRINTED: dict[tuple[str, ...], tuple[int, str]] = {
    (): (16, "1x"),
    ("g16",): (14, "1.14x"),
    (UPDATE,): (4, "4x"),
    ("g16", UPDATE): (4, "8x"),
}


@dataclass(frozen=True)
class Row:
    """One row; `places` are "gpu" or "cpu" for each of COLUMNS. Bytes are per parameter."""

    places: tuple[str, ...]
    link_bytes_per_param: Fraction
    gpu_bytes_per_param: Fraction
    reduction: Fraction
    printed_gpu_bytes_per_param: int | None  # None: the paper has no such row
    printed_reduction: str | None

    @property
    def misprinted(self) -> bool:
        return self.printed_gpu_bytes_per_param != self.gpu_bytes_per_param


def table_1() -> tuple[Row, ...]:
    """The paper's table, out of all placements of the super nodes: no traffic first, then the least there is."""
    optimum = Optimum(PAPER)
    fused = optimum.fused_placements
    least = min(each.link_bytes_per_param for each in optimum.least_traffic)
    rows = [_row(each, fused[0]) for each in fused.select(fused.in_scope) if each.link_bytes_per_param <= least]
    return tuple(sorted(rows, key=lambda row: -row.gpu_bytes_per_param))


def _row(placement: Placement, baseline: Placement) -> Row:
    printed = PRINTED.get(placement.on_cpu, (None, None))
    return Row(
        places=tuple("cpu" if name in placement.on_cpu else "gpu" for name in COLUMNS),
        link_bytes_per_param=placement.link_bytes_per_param,
        gpu_bytes_per_param=placement.gpu_bytes_per_param,
        reduction=baseline.gpu_bytes_per_param / placement.gpu_bytes_per_param,
        printed_gpu_bytes_per_param=printed[0],
        printed_reduction=printed[1],
    )
