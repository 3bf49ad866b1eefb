"""Parameters that were unfrozen, and whose gradients the optimizer takes from its next step or `zero_grad()` on.

Over ranks, the first gradient of such a parameter, if neither came in between, is still this rank's own when a norm is
asked for, which would then be another one on each rank, and so would what the gradients are clipped by.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from zofftk.errors import RankError

if TYPE_CHECKING:
    from zofftk.optimizer import OffloadOptimizer


def norm_check(optimizer: OffloadOptimizer) -> Callable[[], None]:
    """Raises RankError where there are any. Does not keep the optimizer alive."""
    reference = weakref.ref(optimizer)

    def check() -> None:
        if (alive := reference()) is None:
            return
        unknown = [param for param in alive._all_params() if param.requires_grad and id(param) not in alive._managed]
        if unknown:
            raise RankError(
                f"{alive._names()[id(unknown[0])]} was unfrozen, and its gradient is not averaged over ranks yet, so "
                "that a norm would differ between them: call zero_grad() after unfreezing it and before the backward, "
                "or use the option max_grad_norm in place of clip_grad_norm_"
            )

    return check
