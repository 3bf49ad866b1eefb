"""Trains many runs, each resumable on its own, in several processes; and says what that will take."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

import torch

import zofftk
from experiments.curves import kept
from experiments.curves.run import Run
from experiments.curves.trainer import TORCH_THREADS, Trainer, train_run
from zofftk.interrupt import stop_on_interrupt

TIMED_STEPS, UNTIMED_STEPS = 5, 2


def train_all(runs: Sequence[Run], *, workers: int) -> bool:
    """Makes those that have no record yet, first things first; says whether all have one now."""
    todo = [run for run in runs if kept.load_record(run) is None]
    check_tasks(todo)
    print(f"{len(runs) - len(todo)} of {len(runs)} runs are there; records go to {kept.RESULTS}", flush=True)
    if workers == 1:
        return all(report_end(run, train_run(run), began) for run, began in started(todo))
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with (
        stop_on_interrupt(says=False) as stop,  # each worker says so itself
        ProcessPoolExecutor(workers, mp_context=context, initializer=leave_interrupts) as pool,
    ):
        waiting, running = list(todo), dict[Future[bool], tuple[Run, float]]()
        finished = True
        while (waiting and finished and not stop.made) or running:
            # No more than are under way are handed over: one that was would begin after Ctrl-C.
            while waiting and finished and not stop.made and len(running) < workers:
                run = waiting.pop(0)
                running[pool.submit(train_run, run)] = run, time.perf_counter()
            for future in wait(running, timeout=1.0, return_when=FIRST_COMPLETED).done:
                finished &= report_end(*end_of(future, running))
    return finished and not waiting


def check_tasks(runs: Iterable[Run]) -> None:
    """What can be missing is better missed now than after the runs that need it not."""
    if any(run.task == "bert" for run in runs):
        from experiments.curves.minilm import find_archive

        find_archive()


def started(runs: Iterable[Run]) -> Iterable[tuple[Run, float]]:
    for run in runs:
        yield run, time.perf_counter()


def end_of(future: Future[bool], running: dict[Future[bool], tuple[Run, float]]) -> tuple[Run, bool, float]:
    run, began = running.pop(future)
    return run, future.result(), began


def report_end(run: Run, finished: bool, began: float) -> bool:
    took = f"{(time.perf_counter() - began) / 60:.1f} min"
    print(f"{run.experiment}: {run.name} {'finished' if finished else 'interrupted and saved'} ({took})", flush=True)
    return finished


def leave_interrupts() -> None:
    """Ctrl-C reaches every process; a worker heeds it inside a run alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def usable_workers() -> int:
    return len(os.sched_getaffinity(0))


# -- the plan ----------------------------------------------------------------------------------------------------


def describe_plan(runs: Sequence[Run], *, workers: int) -> list[str]:
    """A line for every run with its minutes and what is done of it; what no record tells of is timed now."""
    seconds = {cost: seconds_per_step(cost, runs) for cost in dict.fromkeys(run.cost for run in runs)}
    lines, left = [], 0.0
    for run in runs:
        done, per_step = steps_done(run), seconds[run.cost]
        minutes = run.steps * per_step / 60
        left += (run.steps - done) * per_step / 60
        state = "finished" if done == run.steps else f"at step {done}" if done else "to do"
        lines.append(
            f"{run.experiment:18} {run.name:55} {run.steps:5} steps x {per_step:6.3f} s = {minutes:5.1f} min  {state}"
        )
    lines.append(f"to do: {left:.0f} min of one core, about {left / workers:.0f} min with {workers} at a time")
    return lines


def steps_done(run: Run) -> int:
    if kept.load_record(run) is not None:
        return run.steps
    path = kept.checkpoint_path(run)
    return len(zofftk.load(path, check=False)["losses"]) if path.exists() else 0


def seconds_per_step(cost: tuple[str, str, str], runs: Sequence[Run]) -> float:
    """From the finished runs of this cost, or from a few steps made now, evaluations included."""
    alike = [run for run in runs if run.cost == cost]
    known = [record["results"]["seconds_per_step"] for run in alike if (record := kept.load_record(run)) is not None]
    return sum(known) / len(known) if known else time_steps(alike[0])


def time_steps(run: Run) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(TORCH_THREADS)
    trainer = Trainer(run)
    try:
        for _ in range(UNTIMED_STEPS):
            trainer.train_step()
        began = time.perf_counter()
        for _ in range(TIMED_STEPS):
            trainer.train_step()
        stepped = time.perf_counter()
        trainer.evaluate(at_the_end=False)
        evaluated = time.perf_counter()
    finally:
        trainer.close()
        torch.set_num_threads(threads)
    return (stepped - began) / TIMED_STEPS + (evaluated - stepped) / run.evaluate_every
