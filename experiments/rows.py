"""One row of what a table or figure shows, keyed as the paper's values are."""

from typing import Any


def row(system: str, x_name: str, x: object, value: float | str, unit: str, kind: str, **more: Any) -> dict[str, Any]:
    """`kind`: computed, simulated or measured; `more` is what an item says beside."""
    return {"system": system, "x_name": x_name, "x": str(x), "value": value, "unit": unit, "kind": kind} | more
