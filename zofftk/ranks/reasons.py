"""What torch's errors say in short; the whole text stays with the error itself."""

from __future__ import annotations

import re

SOURCE = re.compile(r"\[[^\]\s]*\.(?:cc|cpp|h|hpp|cu):\d+\]\s*")  # where in its own sources it was raised
LONGEST = 300


def short_reason(error: BaseException) -> str:
    """The first sentence, without paths; advice that follows is for other programs than this one."""
    text = SOURCE.sub("", str(error).strip()).partition("\n")[0]
    return re.split(r"\. (?=[A-Z])", text, maxsplit=1)[0].strip().removesuffix(".")[:LONGEST]


def named_reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {short_reason(error)}"
