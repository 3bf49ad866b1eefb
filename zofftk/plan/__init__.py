"""What a run will cost, before it is started: `plan` asks dry runs of the engine, and finds what fits and what is best.

from zofftk.plan import Setting, plan

answer = plan("13b", "v100-dgx2", Setting(micro_batch=4))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zofftk.plan.answer import Plan as Plan
    from zofftk.plan.planner import plan as plan
    from zofftk.plan.setting import Setting as Setting
    from zofftk.plan.sources import Source as Source

__all__ = ["Plan", "Setting", "Source", "plan"]

_HOMES = {"Plan": "answer", "Setting": "setting", "Source": "sources", "plan": "planner"}


def __getattr__(name: str) -> Any:
    """Loaded when it is first asked for: the command line reads its options without torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"zofftk.plan.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'zofftk.plan' has no attribute {name!r}")
