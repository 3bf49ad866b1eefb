"""What one rank tells the others of itself, in torch.distributed's store; its last word comes when its process ends."""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.util import Finalize
from typing import Any

from zofftk.errors import RankError, StoreSilentError
from zofftk.ranks.reasons import named_reason

VERDICT = "verdict"
DROPPED = "has dropped its optimizer"
ENDED = "has ended without closing its optimizer"


@dataclass(frozen=True)
class Sign:
    """What a rank has said last."""

    number: int
    place: str  # what it has begun, or done, last
    fault: str | None
    is_closed: bool
    end: str | None = None


class Voice:
    """Of rank `rank`. `linger_s`: for so long its process stays after a last word, where the store would go with it."""

    def __init__(self, store: Any, rank: int, linger_s: float) -> None:
        self.store, self._rank, self._linger_s = store, rank, linger_s
        self.at, self.is_past = "construction", False  # plain attributes: collectives set them
        self.fault: str | None = None
        self.verdict: str | None = None  # why all of them cannot go on, by the rank that knew it first
        self._number, self._is_closed, self._end = 0, False, None
        self._lock = threading.Lock()
        # Unlike atexit, this also comes at the end of a process of `multiprocessing`.
        self._at_exit = Finalize(None, self._end_with_process, exitpriority=10)

    @property
    def place(self) -> str:
        return f"after {self.at}" if self.is_past else f"at {self.at}"

    def write(self) -> None:
        with self._lock:
            self._number += 1
            self.store.set(str(self._rank), self._sign())

    def try_to_write(self) -> bool:
        try:
            self.write()
        except StoreSilentError:  # it may answer again
            return True
        except Exception:  # the store is gone: the collectives will say so
            return False
        return True

    def hear(self) -> None:
        with suppress(Exception):  # the store is gone
            if self.verdict is None and (word := self.store.get(VERDICT)) is not None:
                self.verdict = word.decode()

    def judge(self, verdict: str) -> None:
        """Have the others hear it: who fails after this rank's end, because of it, may find no store to look in."""
        self.hear()
        if self.verdict is None:
            self.verdict = verdict
            with suppress(Exception):
                self.store.set(VERDICT, verdict)

    def close(self) -> None:
        self._at_exit.cancel()
        self._is_closed = True
        self.try_to_write()

    def drop(self) -> None:
        """Called where garbage is collected, in any thread: it must not wait."""
        self._at_exit.cancel()
        self._number, self._end = self._number + 1, DROPPED
        self.store.post(str(self._rank), self._sign())

    def _end_with_process(self) -> None:
        # The first in a process of `multiprocessing`, the second in a script: its traceback has been printed.
        error = sys.exc_info()[1] or (None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))
        self._end = ENDED
        if error is None or isinstance(error, SystemExit):
            self.try_to_write()
            return
        if not isinstance(error, RankError) and self.fault is None:
            self._end = f"has ended with {named_reason(error)}"
            self.judge(f"rank {self._rank} {self._end}")
        if self.try_to_write():
            time.sleep(self._linger_s)

    def _sign(self) -> str:
        return json.dumps(asdict(Sign(self._number, self.place, self.fault, self._is_closed, self._end)))
