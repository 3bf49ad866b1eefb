"""Calls that end, though what they wait for may never answer: each runs in a thread that is given up after a while.

The process that holds torch.distributed's store may be stopped. Torch's calls of the store then never return, whatever
timeout they were given: it is the store that would have to say that time is up.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from zofftk.errors import StoreSilentError

T = TypeVar("T")
ANSWER_S = 2.5  # a store that is there answers in milliseconds
LOOK_S = 0.5
GRACE_S = 2.0  # torch's own timeouts come before ours, where they work: they say more
HOLDER = "the process that holds torch.distributed's store (rank 0, or the launcher)"
SILENT = f"{HOLDER} does not answer"
LOST = f"has lost {HOLDER}"


@dataclass
class _Call:
    work: Callable[[Any], Any]
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None
    is_given_up: bool = False

    def run(self, argument: Any) -> None:
        try:
            self.result = self.work(argument)
        except BaseException as error:
            self.error = error

    def value(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


class PatientStore:
    """A part of torch.distributed's store, over a connection of its own: the other may be held by somebody who waits.

    Raises StoreSilentError after `answer_s`, and from then on at once, until it answers again.
    """

    def __init__(self, store: Any, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._state = _State()
        # One thread for all calls: at the interpreter's end, when last words are written, no other can be started.
        self._thread = threading.Thread(
            target=_serve, args=(store, self._calls, self._state), name="zofftk-store", daemon=True
        )
        self._thread.start()
        self._forgotten = weakref.finalize(self, self._calls.put, None)
        self._forgotten.atexit = False
        # Torch aborts a process whose interpreter ends while a thread is in a call of the store. Last words come first.
        self._end = Finalize(None, _end, (self._calls, self._thread, self._state), exitpriority=0)

    def close(self) -> None:
        """End the thread, unless it waits for a store that does not answer."""
        self._forgotten.detach()
        self._end()

    def set(self, key: str, value: str) -> None:
        self._ask(lambda store: store.set(key, value))

    def post(self, key: str, value: str) -> None:
        """`set`, sooner or later."""
        self._calls.put(_Call(lambda store: store.set(key, value)))

    def get(self, key: str) -> bytes | None:
        """None where nobody has set it."""
        return self._ask(lambda store: store.get(key) if store.check([key]) else None)

    def _ask(self, work: Callable[[Any], Any]) -> Any:
        call, state = _Call(work), self._state
        if not state.is_silent:
            self._calls.put(call)
            call.done.wait(self._answer_s)
        with state.lock:
            if not call.done.is_set():
                state.is_silent = call.is_given_up = True
                raise StoreSilentError(SILENT)
        return call.value()


@dataclass
class _State:
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_silent: bool = False  # there is a call that was given up and has not ended


def _end(calls: SimpleQueue[_Call | None], thread: threading.Thread, state: _State) -> None:
    calls.put(None)
    if not state.is_silent:
        thread.join(ANSWER_S)


def _serve(store: Any, calls: SimpleQueue[_Call | None], state: _State) -> None:
    opening = _Call(lambda store: store.clone() if hasattr(store, "clone") else store)
    opening.run(store)
    while (call := calls.get()) is not None:
        if not call.is_given_up:
            if opening.error is None:
                call.run(opening.result)
            else:
                call.error = opening.error
        with state.lock:
            state.is_silent = False
            call.done.set()
        del call


def within(limit_s: float, work: Callable[[], T], look: Callable[[], None] = lambda: None) -> T:
    """What `work` gives, which talks to the store in torch's own code; unless `look` raises meanwhile."""
    call = _Call(lambda device: work() if device is None else _on(device, work))
    # Each thread has its own.
    device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def run() -> None:
        call.run(device)
        call.done.set()

    threading.Thread(target=run, name="zofftk-patience", daemon=True).start()
    deadline = time.monotonic() + limit_s
    while not call.done.wait(max(0.0, min(LOOK_S, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            raise StoreSilentError(SILENT)
        look()
    return call.value()


def _on(device: int, work: Callable[[], T]) -> T:
    with torch.cuda.device(device):
        return work()
