"""One training run from its first step, or from where it was interrupted, to its record."""

import time
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import zofftk
from experiments.curves import kept
from experiments.curves.plain import PlainAdamW, TorchAdamW
from experiments.curves.run import MAX_GRAD_NORM, Run
from zofftk.errors import InputError
from zofftk.interrupt import stop_on_interrupt
from zofftk.optimizer import OffloadOptimizer
from zofftk.run_record import describe_run, git_state, hardware, write_record
from zofftk.train import lr_factor

SECONDS_BETWEEN_CHECKPOINTS = 30.0
# Two runs beside each other on two cores make more steps than one run on both, and their bits do not hang on the number
# of cores.
TORCH_THREADS = 1
OFFLOADING = {"AdamW": zofftk.OffloadAdamW, "SGD": zofftk.OffloadSGD, "Lion": zofftk.OffloadLion}


class Task(Protocol):
    """A model and its data; all of it depends on the run alone."""

    def build(self) -> nn.Module: ...
    def loss(self, model: nn.Module, step: int) -> Tensor: ...
    def evaluate(self, model: nn.Module, *, at_the_end: bool) -> dict[str, float]: ...
    def describe(self) -> dict[str, Any]: ...


def make_task(run: Run) -> Task:
    if run.task == "gpt":
        from experiments.curves.gpt import GPTTask

        return GPTTask(run)
    from experiments.curves.bert import BertTask

    return BertTask(run)


def make_optimizer(run: Run, model: nn.Module) -> Any:
    options: dict[str, Any] = run.hyper | {"lr": run.lr, "max_grad_norm": MAX_GRAD_NORM}
    if run.update == "plain":
        return PlainAdamW(model.parameters(), **options)
    if run.update == "torch":
        return TorchAdamW(model.parameters(), **options)
    if run.delay_after is not None:
        options["delay_after"] = run.delay_after
    return OFFLOADING[run.optimizer](model.parameters(), update=run.update, backwards_per_step=1, **options)


class Trainer:
    """All that changes from step to step, and what is saved of it."""

    def __init__(self, run: Run) -> None:
        self.run, self.task = run, make_task(run)
        self.data = self.task.describe()
        self.model = self.task.build()
        self.optimizer = make_optimizer(run, self.model)
        self.losses: list[float] = []
        self.evaluations: list[dict[str, float]] = []
        self.sessions: list[dict[str, Any]] = []  # an interrupted run has several

    @property
    def step(self) -> int:
        return len(self.losses)

    def train_step(self) -> None:
        """The loss is kept as the shortest decimal that gives its fp32 bits back."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.lr * lr_factor(self.step, steps=self.run.steps)
        loss = self.task.loss(self.model, self.step)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(str(np.float32(loss.item()))))
        if self.step % self.run.evaluate_every == 0:
            self.evaluations.append({"step": self.step} | self.evaluate(at_the_end=False))

    def evaluate(self, *, at_the_end: bool) -> dict[str, float]:
        self.model.eval()
        with torch.no_grad():
            result = self.task.evaluate(self.model, at_the_end=at_the_end)
        self.model.train()
        return result

    def finish(self) -> dict[str, float]:
        """What the run comes to, once an update that is late has been applied."""
        if isinstance(self.optimizer, OffloadOptimizer):
            self.optimizer.flush()
        return self.evaluate(at_the_end=True)

    def close(self) -> None:
        if isinstance(self.optimizer, OffloadOptimizer):
            self.optimizer.close()

    # -- files -------------------------------------------------------------------------------------------------

    def begin_session(self) -> float:
        git = git_state(kept.RESULTS.parent)
        self.sessions.append({"first_step": self.step, "git": git, "hardware": hardware(), "seconds": 0.0})
        return time.perf_counter()

    def save(self) -> None:
        content: dict[str, Any] = {"config": self.run.describe(), "data": self.data, "model": self.model.state_dict()}
        content |= {"optimizer": self.optimizer.state_dict(), "losses": self.losses}
        content |= {"evaluations": self.evaluations, "sessions": self.sessions}
        zofftk.save(kept.checkpoint_path(self.run), content)

    def resume(self) -> None:
        path = kept.checkpoint_path(self.run)
        if not path.exists():
            return
        saved = zofftk.load(path)
        kept.check_same(self.run, saved["config"], path)
        if saved["data"] != self.data:
            raise InputError(f"expected the data that {path} was trained on, got another; --fresh starts again")
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.losses, self.evaluations, self.sessions = saved["losses"], saved["evaluations"], saved["sessions"]

    def write_record(self, results: dict[str, float]) -> None:
        config = self.run.describe() | {"torch_threads": TORCH_THREADS}
        samples = {"losses": self.losses, "evaluations": self.evaluations}
        seconds = sum(session["seconds"] for session in self.sessions)
        results = results | {"params": sum(param.numel() for param in self.model.parameters())}
        results |= {"seconds": seconds, "seconds_per_step": seconds / self.run.steps}
        record = describe_run(config, experiment=self.run.experiment, data=self.data, results=results, samples=samples)
        write_record(kept.record_path(self.run), record | {"sessions": self.sessions})
        kept.checkpoint_path(self.run).unlink(missing_ok=True)


def train_run(run: Run, *, stop_after: int | None = None) -> bool:
    """Trains `run` to its end and writes its record; says whether it got there before Ctrl-C, or `stop_after` steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(TORCH_THREADS)
    trainer = Trainer(run)
    try:
        trainer.resume()
        return run_steps(trainer, run.steps if stop_after is None else min(run.steps, trainer.step + stop_after))
    finally:
        trainer.close()
        torch.set_num_threads(threads)


def run_steps(trainer: Trainer, last: int) -> bool:
    began, session = trainer.begin_session(), trainer.sessions[-1]
    saved = began
    with stop_on_interrupt() as stop:
        while trainer.step < last and not stop.made:
            trainer.train_step()
            if time.perf_counter() - saved > SECONDS_BETWEEN_CHECKPOINTS:
                session["seconds"] = time.perf_counter() - began
                trainer.save()
                saved = time.perf_counter()
        finished = trainer.step == trainer.run.steps and not stop.made
        results = trainer.finish() if finished else {}
        session["seconds"] = time.perf_counter() - began
        trainer.write_record(results) if finished else trainer.save()
    return finished
