"""Work in a second process, which begins with all that this one knows: a plan's searches keep two cores busy."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@contextmanager
def beside(work: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Runs `work` meanwhile; what is yielded waits for its result, or raises what it has raised.

    Where there is one core, or a GPU, whose driver and whose threads of autograd a fork would lose, it runs when it is
    asked for.
    """
    if len(os.sched_getaffinity(0)) < 2 or torch.cuda.is_available():
        yield work
        return
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender, work), daemon=True)
    with warnings.catch_warnings():
        # Later Pythons warn of a fork beside threads: torch's have nothing to do in a dry run, here or there.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sender.close()
    try:
        yield lambda: _received(receiver)
    finally:
        child.kill()  # it has sent its result, or nobody waits for it
        child.join()
        receiver.close()


def _send(sender: Any, work: Callable[[], Any]) -> None:
    try:
        sender.send((True, work()))
    except Exception as error:
        sender.send((False, error))


def _received(receiver: Any) -> Any:
    is_result, value = receiver.recv()
    if not is_result:
        raise value
    return value
