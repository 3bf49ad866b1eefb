"""Runs tables and figures one after the other: shows where it is, goes on after an interruption, survives failures."""

import argparse
import importlib
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.record import item_path, read_item, setting
from experiments.registry import ITEMS, Item

INTERRUPTED = 130


def carry_out(names: Sequence[str], *, quick: bool, fresh: bool, console: Console, again: bool = False) -> int:
    """An item whose record is there is left out. `fresh` and `again` take the records away first, so that what an
    interruption leaves undone is done by the same command without it; `fresh` also makes training runs anew.
    """
    if fresh or again:
        for name in names:
            item_path(name, quick=quick).unlink(missing_ok=True)
    console.print(_announcement(names, quick), highlight=False)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    failed = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name)
            try:
                said = _carry_out_one(name, quick=quick, fresh=fresh)
            except KeyboardInterrupt:
                console.print(f"interrupted in {name}: the same command, without --fresh or --again, goes on with it")
                return INTERRUPTED
            except Exception as error:  # the others can do without it
                said = f"failed: {type(error).__name__}: {error}"
                failed.append(name)
            console.print(f"{name}: {said}", highlight=False, markup=False)
            progress.advance(task)
    if failed:
        console.print(f"without a record: {', '.join(failed)}", highlight=False)
    return 1 if failed else 0


def _announcement(names: Sequence[str], quick: bool) -> str:
    to_do = [name for name in names if not is_finished(name, quick=quick)]
    minutes = sum(_minutes(ITEMS[name], quick) for name in to_do)
    return f"{len(names) - len(to_do)} of {len(names)} have a record; about {minutes:.0f} minutes for the others"


def _minutes(item: Item, quick: bool) -> float:
    return item.quick_minutes if quick else item.minutes


def _carry_out_one(name: str, *, quick: bool, fresh: bool) -> str:
    """What became of it, in words; raises what the experiment raises."""
    if is_finished(name, quick=quick):
        return "there already"
    began_s = time.perf_counter()
    with setting(quick=quick):
        module = importlib.import_module(f"experiments.{name}")
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        # An experiment without such an option runs as ever.
        wanted = ["--quick"] * quick + ["--fresh"] * fresh
        code = module.run(parser.parse_known_args(wanted)[0])
    if not is_finished(name, quick=quick):
        raise RuntimeError(f"it ended with {code} and left no record")
    return f"done in {time.perf_counter() - began_s:.0f} s"


def is_finished(name: str, *, quick: bool) -> bool:
    """A record of this setting is there, whole, of all training runs, and with today's calibration where it has one."""
    record = read_item(name, quick=quick)
    config = record.get("config") if record is not None else None
    if not isinstance(config, dict) or config.get("missing"):
        return False
    if "calibration" not in config:
        return True
    from experiments.calibration.calibrated import load  # which imports torch, too slow for what only lists

    return config["calibration"] == dict(load().values)
