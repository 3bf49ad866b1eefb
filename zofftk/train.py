"""The training loop of `zofftk train`, top to bottom: text, model, optimizer, steps, files."""

import math
import shlex
import time
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
from zofftk.outputs import Outputs
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
    if config.dtype == "fp16":
        say(console, "fp16 without a loss scaler: small gradients become 0, overflowing steps are skipped; prefer bf16")
    outputs.folder.mkdir(parents=True, exist_ok=True)
    with closing(training.optimizer):
        interrupted = run_steps(training, outputs, console)
        if interrupted or outputs.save or outputs.save_every:
            save_checkpoint(outputs.checkpoint, snapshot(training))
        write_results(training, outputs, record)
        if interrupted:
            say(console, f"Stopped after step {training.step} of {config.steps}. To go on:")
            say(console, f"  zofftk train --resume {shlex.quote(str(outputs.checkpoint))}")
            return INTERRUPTED
        print_summary(console, training.optimizer.report(), training.samples)
    say(console, f"Written to {outputs.folder}: record.json, loss.png, timeline.json (opens in ui.perfetto.dev)")
    return 0


def say(console: Console, line: str) -> None:
    """Prints a line as it is: unbroken, and without reading brackets in a path as markup."""
    console.print(line, soft_wrap=True, highlight=False, markup=False)


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


def build_optimizer(model: nn.Module, config: TrainConfig) -> "OffloadAdamW":
    from zofftk import OffloadAdamW

    return OffloadAdamW(
        model.parameters(),
        lr=config.lr,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        max_grad_norm=config.max_grad_norm,
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
                save_checkpoint(outputs.checkpoint, snapshot(training))
    return training.step < config.steps


def train_step(training: Training) -> dict[str, Any]:
    """One batch through the model and the optimizer; the times are those this thread spent."""
    config, step = training.config, training.step
    ids, targets = training.corpus.batch(seed=config.seed, step=step, batch_size=config.batch_size, seq=config.seq_len)
    ids, targets = ids.to(training.device), targets.to(training.device)
    clock = [time.perf_counter()]
    loss = training.model(ids, targets)
    clock.append(time.perf_counter())
    loss.backward()
    clock.append(time.perf_counter())
    lr = training.schedule.get_last_lr()[0]
    training.optimizer.step()
    training.optimizer.zero_grad()
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


def write_results(training: Training, outputs: Outputs, record: dict[str, Any]) -> None:
    report = asdict(training.optimizer.report())
    write_record(outputs.folder / "record.json", record | {"report": report, "samples": training.samples})
    draw_loss_curve(outputs.folder / "loss.png", training.samples)
    training.optimizer.write_trace(outputs.folder / "timeline.json")
