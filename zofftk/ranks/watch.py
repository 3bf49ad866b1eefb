"""Signs of life between ranks, so that a failed collective becomes an error that names a rank and a reason.

A collective that fails says that a connection was closed or that time is up. Who is gone, or where the others are
held up, the store of torch.distributed tells: every rank writes there, once a second, that it is alive and what it
does.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from zofftk.errors import RankError, RankGoneError, StoreSilentError
from zofftk.ranks.patience import PatientStore

INTERVAL_S = 1.0
PATIENCE_S = 2.5  # a rank that gives no sign for so long is gone
VERDICT = "verdict"
LEAST_S = 1.5  # ... or for so long, where the store is lost then
LOST = "has lost the process that holds torch.distributed's store (rank 0, or the launcher)"


@dataclass(frozen=True)
class Sign:
    """What a rank has said last."""

    number: int
    at: str  # what it has begun
    fault: str | None
    is_closed: bool


class Watch:
    """One rank's signs. Its thread ends with `close`, or when the watch is forgotten.

    Args:
        store: of torch.distributed, a part of it that nobody else writes to.
        rank: this one, by its number in the world, as all others.
        ranks: all that give signs.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int]) -> None:
        self._rank, self._others = rank, [other for other in ranks if other != rank]
        self._store = PatientStore(store)
        self.at = "construction"
        self.verdict: str | None = None  # why all of them cannot go on, by the rank that knew it first
        self._number, self._fault, self._is_closed = 0, None, False
        self._lock = threading.Lock()
        self._end = threading.Event()
        try:
            self._write()
        except StoreSilentError:
            raise
        except RuntimeError as error:
            raise RankGoneError(f"rank {rank} {LOST}") from error
        self._thread = threading.Thread(
            target=_keep_writing, args=(weakref.ref(self), self._end), name="zofftk-signs", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """This rank needs the others no more."""
        self._end.set()
        self._thread.join()
        self._is_closed = True
        self._try_to_write()

    def blame(self, error: BaseException) -> RankError:
        """Why a collective has failed here."""
        self._fault = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        self._try_to_write()
        self.hear()
        if self.verdict is not None:
            return RankError(f"rank {self._rank} cannot go on at {self.at}: {self.verdict} ({self._fault})")
        try:
            signs = self._look()
        except StoreSilentError as silence:
            return RankError(f"rank {self._rank} cannot go on at {self.at}: {silence} ({self._fault})")
        if signs is None:
            return RankError(f"rank {self._rank} {LOST}, at {self.at}: {self._fault}")
        reason, is_first_cause = _reason(*signs)
        if is_first_cause:
            self.judge(reason)
        return RankError(f"rank {self._rank} cannot go on at {self.at}: {reason} ({self._fault})")

    def judge(self, verdict: str) -> None:
        """Have the others hear it: who fails after this rank's end, because of it, may find no store to look in."""
        self.hear()
        if self.verdict is None:
            self.verdict = verdict
            with suppress(Exception):
                self._store.set(VERDICT, verdict)

    def hear(self) -> None:
        with suppress(Exception):  # the store is gone
            if self.verdict is None and (word := self._store.get(VERDICT)) is not None:
                self.verdict = word.decode()

    def _look(self) -> tuple[dict[int, Sign | None], dict[int, Sign | None]] | None:
        """The others' signs some time apart; None where the store is gone, or goes too soon.

        Whoever holds it may have failed as well, for the same reason, and end meanwhile.
        """
        began = time.monotonic()
        before = now = None
        try:
            before = now = self._read_others()
            while (left := began + PATIENCE_S - time.monotonic()) > 0:
                self._end.wait(min(left, 0.25))
                now = self._read_others()
        except StoreSilentError:
            if before is None or now is None:
                raise
        except Exception:
            if before is None or now is None or time.monotonic() - began < LEAST_S:
                return None
        return before, now

    def _read_others(self) -> dict[int, Sign | None]:
        signs: dict[int, Sign | None] = {}
        for rank in self._others:
            word = self._store.get(str(rank))
            signs[rank] = None if word is None else Sign(**json.loads(word))
        return signs

    def _write(self) -> None:
        with self._lock:
            self._number += 1
            sign = {"number": self._number, "at": self.at, "fault": self._fault, "is_closed": self._is_closed}
            self._store.set(str(self._rank), json.dumps(sign))

    def _try_to_write(self) -> bool:
        try:
            self._write()
        except StoreSilentError:  # it may go on
            return True
        except Exception:  # the store is gone: the collectives will say so
            return False
        return True


def _reason(before: dict[int, Sign | None], now: dict[int, Sign | None]) -> tuple[str, bool]:
    """Why; and whether it is the first cause for sure.

    A rank that has failed as well, and closed or ended then, is no cause.
    """
    for rank, sign in now.items():
        if sign is None:
            return f"rank {rank} has never begun", True
        if sign == before[rank] and not sign.is_closed and not sign.fault:
            return f"rank {rank} has died or cannot be reached; it was at {sign.at}", True
    signs = {rank: sign for rank, sign in now.items() if sign is not None}
    for rank, sign in signs.items():
        if sign.is_closed and not sign.fault:
            return f"rank {rank} has closed its optimizer", True
    held_up = [
        f"rank {rank} is alive but does not come, it is at {sign.at}" for rank, sign in signs.items() if not sign.fault
    ]
    failed = [f"rank {rank} has failed as well, at {sign.at}" for rank, sign in signs.items()]
    return "; ".join(held_up or failed), False


def _keep_writing(reference: weakref.ref[Watch], end: threading.Event) -> None:
    while not end.wait(INTERVAL_S):
        watch = reference()
        if watch is None or not watch._try_to_write():
            return
        watch.hear()
        del watch
