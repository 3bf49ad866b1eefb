"""The training loop of `zofftk train`, top to bottom: text, model, optimizer, steps, files."""

import math
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from zofftk.checkpoint import Checkpoint, save_checkpoint
from zofftk.data import Corpus, load_corpus
from zofftk.errors import InputError
from zofftk.gpt import build_gpt
from zofftk.host_memory import usable_memory
from zofftk.interrupt import stop_on_interrupt
from zofftk.loss_curve import draw_loss_curve
from zofftk.outputs import RESULTS, Outputs
from zofftk.progress import open_progress
from zofftk.run_record import describe_run, write_record
from zofftk.summary import print_summary
from zofftk.train_config import TrainConfig

if TYPE_CHECKING:
    from zofftk import OffloadAdamW

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
WARMUP_STEPS = 20
FINAL_LR_FRACTION = 0.1
INTERRUPTED = 130
STATE_BYTES_PER_PARAM = 12  # fp32 master copy and both moments; the gradient comes to them in the parameter's dtype


@dataclass(kw_only=True)
class Training:
    """All that changes from step to step."""

    config: TrainConfig
    corpus: Corpus
    device: torch.device
    model: nn.Module
    optimizer: "OffloadAdamW"
    schedule: LambdaLR
    samples: list[dict[str, Any]]

    @property
    def step(self) -> int:
        return len(self.samples)


def train(
    config: TrainConfig, outputs: Outputs, *, resume: Checkpoint | None = None, console: Console | None = None
) -> int:
    """Runs `config` to its last step, from the first one or from where `resume` was saved; returns the exit code."""
    console = Console() if console is None else console
    training = prepare(config, resume)
    record = describe_run(asdict(config), resumed_at=training.step if resume else None)
    outputs.folder.mkdir(parents=True, exist_ok=True)
    failures = []
    with closing(training.optimizer):
        interrupted = run_steps(training, outputs, console)
        wanted = interrupted or outputs.save is not None or outputs.save_every is not None
        saved = wanted and try_to(failures, save_checkpoint, outputs.checkpoint, snapshot(training))
        written = write_results(training, outputs, record, failures)
        if not interrupted:
            print_summary(console, training.optimizer.report(), training.samples)
    if written:
        say(console, f"Written to {outputs.folder}: {', '.join(written)} (timeline.json opens in ui.perfetto.dev)")
    if interrupted:
        say(console, f"Stopped after step {training.step} of {config.steps}.{' To go on:' if saved else ''}")
        if saved:
            say(console, f"  zofftk train --resume {shlex.quote(str(outputs.checkpoint))}")
    if failures:
        raise OSError("; ".join(map(str, failures)))
    return INTERRUPTED if interrupted else 0


def try_to(failures: list[OSError], write: Callable[..., None], *arguments: Any) -> bool:
    """Writes one file of the run; one that cannot be written must not keep the others from being written."""
    try:
        write(*arguments)
    except OSError as error:
        failures.append(error)
        return False
    return True


def say(console: Console, line: str) -> None:
    """Prints a line as it is: unbroken, and without reading brackets in a path as markup."""
    encodable = line.encode(errors="backslashreplace").decode()
    console.print(encodable, soft_wrap=True, highlight=False, markup=False)


def prepare(config: TrainConfig, resume: Checkpoint | None) -> Training:
    """Text, model and optimizer of the run, brought to where `resume` was saved."""
    device = choose_device(config.device)
    if resume and resume.step >= config.steps:
        raise InputError(f"--steps: expected more than the {resume.step} of the checkpoint, got {config.steps}")
    check_memory(config, device)
    files = None if config.data is None else [Path(file) for file in config.data]
    corpus = load_corpus(files, vocab=config.model.vocab, seq=config.seq_len)
    if resume and resume.data_fingerprint != corpus.fingerprint:
        raise InputError("--resume: expected the text of the checkpoint, got another; name its files with --data")
    model = build_gpt(config.model, seed=config.seed, dtype=TORCH_DTYPES[config.dtype], device=device)
    if resume:
        resume.check_model(config.model, model)
        model.load_state_dict(resume.model)
    # The optimizer takes its fp32 master copies from the model, which therefore comes first.
    optimizer = build_optimizer(model, config)
    schedule = LambdaLR(optimizer, partial(lr_factor, steps=config.steps))
    if resume:
        optimizer.load_state_dict(resume.optimizer)
        schedule.load_state_dict(resume.schedule)
        continue_schedule(schedule)
    return Training(
        config=config,
        corpus=corpus,
        device=device,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        samples=list(resume.samples) if resume else [],
    )


def check_memory(config: TrainConfig, device: torch.device) -> None:
    """Refuses a model whose states alone exceed the host, before the system starts killing processes."""
    params = config.model.num_params
    itemsize = TORCH_DTYPES[config.dtype].itemsize
    bytes_per_param = STATE_BYTES_PER_PARAM + itemsize + (itemsize if device.type == "cpu" else 0)
    needed, usable = params * bytes_per_param / 2**30, usable_memory() / 2**30
    if needed > usable:
        raise InputError(
            f"--preset: expected a model that fits {usable:.1f} GiB of memory, {config.preset} needs {needed:.1f}"
        )
    if device.type == "cuda":
        usable = torch.cuda.get_device_properties(device).total_memory / 2**30
    if (needed := step_bytes(config) / 2**30) > usable:
        raise InputError(
            f"--batch-size: expected a batch that fits {usable:.1f} GiB of memory, {config.batch_size} sequences of "
            f"{config.seq_len} tokens need at least {needed:.1f}"
        )


def step_bytes(config: TrainConfig) -> int:
    """What forward keeps for backward, at the least: the logits (and in fp32, twice) and the layers' activations."""
    model, itemsize = config.model, TORCH_DTYPES[config.dtype].itemsize
    kept_per_layer = 1 if model.recompute else 16  # tensors of the hidden size
    per_token = model.vocab * (itemsize + 8) + model.layers * kept_per_layer * model.hidden * itemsize
    return config.batch_size * config.seq_len * per_token


def build_optimizer(model: nn.Module, config: TrainConfig) -> "OffloadAdamW":
    from zofftk import LossScale, OffloadAdamW

    return OffloadAdamW(
        model.parameters(),
        lr=config.lr,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        max_grad_norm=config.max_grad_norm,
        loss_scale=LossScale() if config.dtype == "fp16" else None,
        update=config.update,
        delay_after=config.delay_after,
        backwards_per_step=1,
        trace=True,
    )


def lr_factor(step: int, *, steps: int) -> float:
    """Linear warm-up, then half a cosine down to a tenth at the last step."""
    warmup = min(WARMUP_STEPS, steps // 10 + 1)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * (1 + math.cos(math.pi * progress)) / 2


def continue_schedule(schedule: LambdaLR) -> None:
    """The learning rate of the next step by this run's own number of steps, which may be another than the saved one."""
    rates = [
        base * factor(schedule.last_epoch) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


def choose_device(name: str) -> torch.device:
    """auto: a GPU where torch has one and CuPy is there to reach it."""
    usable = torch.cuda.is_available() and find_spec("cupy") is not None
    if name == "cuda" and not usable:
        raise InputError("--device: expected a GPU that torch and CuPy can use, got cuda; see `zofftk doctor`")
    return torch.device("cuda" if usable and name != "cpu" else "cpu")


def run_steps(training: Training, outputs: Outputs, console: Console) -> bool:
    """Steps until the last one or Ctrl-C; says whether it was Ctrl-C."""
    config = training.config
    with stop_on_interrupt() as stop, open_progress(console, config.steps, training.step) as show:
        while training.step < config.steps and not stop.made:
            training.samples.append(train_step(training))
            show(training.samples[-1], config.batch_size * config.seq_len)
            if outputs.save_every and training.step % outputs.save_every == 0:
                failures = []
                if not try_to(failures, save_checkpoint, outputs.checkpoint, snapshot(training)):
                    say(console, f"warning: no checkpoint after step {training.step}, going on: {failures[0]}")
    return training.step < config.steps


def train_step(training: Training) -> dict[str, Any]:
    """One batch through the model and the optimizer; the times are those this thread spent."""
    config, step = training.config, training.step
    ids, targets = training.corpus.batch(seed=config.seed, step=step, batch_size=config.batch_size, seq=config.seq_len)
    ids, targets = ids.to(training.device), targets.to(training.device)
    clock = [time.perf_counter()]
    loss = training.model(ids, targets)
    clock.append(time.perf_counter())
    training.optimizer.scale_loss(loss).backward()
    clock.append(time.perf_counter())
    lr = training.schedule.get_last_lr()[0]
    training.optimizer.step()
    training.optimizer.zero_grad()
    if not training.optimizer.last_step_skipped:
        training.schedule.step()
    training.optimizer.trace.add("compute", "forward", clock[0], clock[1])
    training.optimizer.trace.add("compute", "backward", clock[1], clock[2])
    # Reading the loss waits for the device, so it comes after everything has been enqueued.
    loss = loss.item()
    clock.append(time.perf_counter())
    return {
        "step": step,
        "loss": loss,
        "lr": lr,
        "grad_norm": training.optimizer.last_grad_norm,
        "forward_ms": 1e3 * (clock[1] - clock[0]),
        "backward_ms": 1e3 * (clock[2] - clock[1]),
        "step_ms": 1e3 * (clock[3] - clock[0]),
    }


def snapshot(training: Training) -> Checkpoint:
    return Checkpoint(
        step=training.step,
        config=asdict(training.config),
        model_config=asdict(training.config.model),
        data_fingerprint=training.corpus.fingerprint,
        samples=training.samples,
        model=training.model.state_dict(),
        optimizer=training.optimizer.state_dict(),
        schedule=training.schedule.state_dict(),
    )


def write_results(
    training: Training, outputs: Outputs, record: dict[str, Any], failures: list[OSError]
) -> Sequence[str]:
    """Record, picture and timeline; returns the names of those that could be written."""
    whole_record = record | {"report": asdict(training.optimizer.report()), "samples": training.samples}
    writers: tuple[Callable[[Path], None], ...] = (
        lambda path: write_record(path, whole_record),
        lambda path: draw_loss_curve(path, training.samples),
        training.optimizer.write_trace,
    )
    return [
        name for name, write in zip(RESULTS, writers, strict=True) if try_to(failures, write, outputs.folder / name)
    ]
