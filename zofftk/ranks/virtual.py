"""`ManyRanks` in a dry run: what other ranks say is what this one says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zofftk.managed import Managed
from zofftk.ranks.many import ManyRanks
from zofftk.ranks.norms import presence_of


class VirtualRanks(ManyRanks):
    """See the module. Words and presence go round as they do elsewhere, without what they say."""

    _told = 0.0

    def _tell(self, word: float) -> None:
        super()._tell(word)
        self._told = word

    def _hear(self) -> np.ndarray:
        return np.full_like(super()._hear(), self._told)

    def _presence(self, managed: Sequence[Managed]) -> tuple[np.ndarray, np.ndarray]:
        super()._presence(managed)
        presence = np.array([[presence_of(one) for one in managed]])
        return presence, np.zeros_like(presence)

    def _check_settings(self) -> None:
        """All update alike."""
