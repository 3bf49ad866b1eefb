"""How far a run is: a bar in a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Shows the newest sample of a step that took so many tokens.
Show = Callable[[dict[str, Any], int], None]
SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def open_progress(console: Console, steps: int, done: int) -> Iterator[Show]:
    with _bar(console, steps, done) if console.is_terminal else _lines(console, steps, done) as show:
        yield show


@contextmanager
def _bar(console: Console, steps: int, done: int) -> Iterator[Show]:
    columns = [
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        TextColumn("left"),
    ]
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("train", total=steps, completed=done, loss=float("nan"), rate=0.0)

        def show(sample: dict[str, Any], tokens: int) -> None:
            rate = 1e3 * tokens / sample["step_ms"]
            progress.update(task, completed=sample["step"] + 1, loss=sample["loss"], rate=rate)

        yield show


@contextmanager
def _lines(console: Console, steps: int, done: int) -> Iterator[Show]:
    began = time.monotonic()
    last_line = float("-inf")

    def show(sample: dict[str, Any], tokens: int) -> None:
        nonlocal last_line
        now, step = time.monotonic(), sample["step"] + 1
        if now - last_line < SECONDS_BETWEEN_LINES and step < steps:
            return
        last_line = now
        rate = 1e3 * tokens / sample["step_ms"]
        left = (now - began) / (step - done) * (steps - step)
        console.print(
            f"step {step}/{steps}  loss {sample['loss']:.3f}  {rate:,.0f} tokens/s  {left:.0f} s left",
            highlight=False,
            soft_wrap=True,
        )

    yield show
