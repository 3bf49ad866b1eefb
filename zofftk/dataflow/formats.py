"""Bytes per parameter and lists of nodes, as people and as programs read them."""

from collections.abc import Collection
from fractions import Fraction


def in_m(bytes_per_param: Fraction) -> str:
    """In units of M, the number of parameters: ``4M``; ``0`` for nothing."""
    return f"{_decimal(bytes_per_param)}M" if bytes_per_param else "0"


def times(ratio: Fraction) -> str:
    return f"{float(ratio):.3g}x"


def as_number(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)


def listed(names: Collection[str]) -> str:
    *others, last = names or ("nothing",)
    return f"{', '.join(others)} and {last}" if others else last


def _decimal(value: Fraction) -> str:
    return f"{float(value):.7g}"
