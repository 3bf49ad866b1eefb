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
from typing import Any

from zofftk.errors import RankError, RankGoneError, StoreSilentError
from zofftk.ranks.patience import LOST, PatientStore
from zofftk.ranks.reasons import named_reason
from zofftk.ranks.voice import Sign, Voice

INTERVAL_S = 1.0
PATIENCE_S = 2.5  # a rank that gives no sign for so long is gone
TICKS = 4
LEAST_S = 1.5  # ... or for so long, where the store is lost then


class Watch:
    """One rank's signs. Its thread ends with `close`, or when the watch is forgotten.

    Args:
        store: of torch.distributed, a part of it that nobody else writes to.
        rank: this one, by its number in the world, as all others.
        ranks: all that give signs.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], *, holds_store: bool = False) -> None:
        self._rank, self._others = rank, [other for other in ranks if other != rank]
        self._store = PatientStore(store)
        self._voice = Voice(self._store, rank, linger_s=1.2 * INTERVAL_S if holds_store else 0.0)
        self._end = threading.Event()
        try:
            self._voice.write()
        except StoreSilentError:
            pass  # busy, perhaps: if it has stopped, the collectives will say so
        except RuntimeError as error:
            raise RankGoneError(f"rank {rank} {LOST}") from error
        self._forgotten = weakref.finalize(self, self._voice.drop)
        self._forgotten.atexit = False
        self._thread = threading.Thread(
            target=_keep_writing, args=(weakref.ref(self), self._end), name="zofftk-signs", daemon=True
        )
        self._thread.start()

    @property
    def at(self) -> str:
        return self._voice.at

    @property
    def verdict(self) -> str | None:
        return self._voice.verdict

    def begin(self, place: str) -> None:
        self._voice.at, self._voice.is_past = place, False

    def done(self) -> None:
        """With what was begun last."""
        self._voice.is_past = True

    def judge(self, verdict: str) -> None:
        self._voice.judge(verdict)

    def close(self) -> None:
        """This rank needs the others no more."""
        self._end.set()
        self._thread.join()
        if self._forgotten.detach():
            self._voice.close()
            self._store.close()

    def blame(self, error: BaseException) -> RankError:
        """Why a collective has failed here."""
        voice = self._voice
        voice.fault = named_reason(error)
        voice.try_to_write()
        voice.hear()
        begin = f"rank {self._rank} cannot go on at {voice.at}"
        if voice.verdict is not None:
            return RankError(f"{begin}: {voice.verdict} ({voice.fault})")
        try:
            signs = self._look()
        except StoreSilentError as silence:
            return RankError(f"{begin}: {silence} ({voice.fault})")
        if signs is None:
            return RankError(f"rank {self._rank} {LOST}, at {voice.at}: {voice.fault}")
        reason, is_first_cause = _reason(*signs)
        if is_first_cause:
            voice.judge(reason)
        return RankError(f"{begin}: {reason} ({voice.fault})")

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


def _reason(before: dict[int, Sign | None], now: dict[int, Sign | None]) -> tuple[str, bool]:
    """Why; and whether it is the first cause for sure.

    A rank that has failed as well, and closed or ended then, is no cause.
    """
    for rank, sign in now.items():
        if sign is None:
            return f"rank {rank} has never begun", True
        if sign.end and not sign.fault:
            return f"rank {rank} {sign.end}, {sign.place}", True
        if sign == before[rank] and not sign.is_closed and not sign.fault:
            return f"rank {rank} has died or cannot be reached; it was last heard of {sign.place}", True
    signs = {rank: sign for rank, sign in now.items() if sign is not None}
    for rank, sign in signs.items():
        if sign.is_closed and not sign.fault:
            return f"rank {rank} has closed its optimizer", True
    held_up = [
        f"rank {rank} is alive but does not come, it is {sign.place}" for rank, sign in signs.items() if not sign.fault
    ]
    failed = [f"rank {rank} has failed as well, {sign.place}" for rank, sign in signs.items()]
    return "; ".join(held_up or failed), False


def _keep_writing(reference: weakref.ref[Watch], end: threading.Event) -> None:
    """Once in an interval, and sooner where there is a new place to tell: steps do not wait for it."""
    told, number = "", 0
    while not end.wait(INTERVAL_S / TICKS):
        if (watch := reference()) is None:
            return
        voice, number = watch._voice, number + 1
        del watch
        if number % TICKS == 0 or voice.place != told:
            told = voice.place
            if not voice.try_to_write():
                return
        if number % TICKS == 0:
            voice.hear()
        del voice
