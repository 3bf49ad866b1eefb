"""The training loop of `zofftk train`, top to bottom: text, model, optimizer, steps, files."""

import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from zofftk.checkpoint import Checkpoint, save_checkpoint
from zofftk.data import Corpus, load_corpus
from zofftk.errors import InputError
from zofftk.gpt import GPT, build_gpt
from zofftk.host_memory import usable_memory
from zofftk.interrupt import stop_on_interrupt
from zofftk.launch import Launch
from zofftk.loss_curve import draw_loss_curve
from zofftk.outputs import RESULTS, Outputs
from zofftk.plan.training import predict
from zofftk.process_memory import forget_peak, peak_bytes, resident_bytes
from zofftk.progress import open_progress
from zofftk.run_record import describe_run, write_record
from zofftk.summary import Sharing, print_summary
from zofftk.train_config import TrainConfig

if TYPE_CHECKING:
    from zofftk import OffloadAdamW

G = TypeVar("G", bound=GPT)
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
    ranks: Launch

    @property
    def step(self) -> int:
        return len(self.samples)


def train(
    config: TrainConfig,
    outputs: Outputs,
    *,
    resume: Checkpoint | None = None,
    console: Console | None = None,
    ranks: Launch | None = None,
) -> int:
    """Runs `config` to its last step, from the first one or from where `resume` was saved; returns the exit code."""
    ranks = ranks or Launch()
    console = Console(quiet=ranks.rank != 0) if console is None else console
    device = ranks.here(lambda: check_run(config, resume, ranks))
    prediction = ranks.first(lambda: predict(config, dp=ranks.dp, tp=ranks.tp, ranks_here=ranks.local_size))
    before_bytes = resident_bytes() if forget_peak() else None
    training = prepare(config, resume, device, ranks)
    record = describe_run(asdict(config), resumed_at=training.step if resume else None, **ranks.describe())
    record["prediction"] = prediction and asdict(prediction)
    ranks.first(lambda: outputs.folder.mkdir(parents=True, exist_ok=True))
    failures = []
    with ranks.closing(training.optimizer):
        interrupted = run_steps(training, outputs, console)
        record["memory"] = {"before_bytes": before_bytes, "peak_bytes": peak_bytes(), "device_bytes": taken_of(device)}
        wanted = interrupted or outputs.save is not None or outputs.save_every is not None
        saved = wanted and try_to(failures, save_run, outputs.checkpoint, training)
        written = ranks.first(lambda: write_results(training, outputs, record, failures))
        if not interrupted:
            report, whole = training.optimizer.report(), config.model.num_params
            print_summary(console, report, training.samples, Sharing(whole, ranks.dp, ranks.tp), prediction)
    if written:
        say(console, f"Written to {outputs.folder}: {', '.join(written)} (timeline.json opens in ui.perfetto.dev)")
    if interrupted:
        say(console, f"Stopped after step {training.step} of {config.steps}.{' To go on:' if saved else ''}")
        if saved:
            program = "zofftk" if ranks.size == 1 else "torchrun ... -m zofftk"
            say(console, f"  {program} train --resume {shlex.quote(str(outputs.checkpoint))}")
    ranks.first(lambda: raise_all(failures))
    return INTERRUPTED if interrupted else 0


def taken_of(device: torch.device) -> int | None:
    """Of a GPU, at most."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def raise_all(failures: list[OSError]) -> None:
    if failures:
        raise OSError("; ".join(map(str, failures)))


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


def prepare(config: TrainConfig, resume: Checkpoint | None, device: torch.device, ranks: Launch) -> Training:
    """Text, model and optimizer of the run, brought to where `resume` was saved."""
    corpus = load_text(config, resume, ranks)
    ranks.build_meshes(device)
    model = ranks.here(lambda: build_model(config, resume, device, ranks))
    # The optimizer takes its fp32 master copies from the model, which therefore comes first.
    with ranks.at("construction"):
        optimizer = build_optimizer(model, config, ranks)
    schedule = LambdaLR(optimizer, partial(lr_factor, steps=config.steps))
    if resume:
        ranks.here(lambda: resume.load_optimizer(model, optimizer))
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
        ranks=ranks,
    )


def check_run(config: TrainConfig, resume: Checkpoint | None, ranks: Launch) -> torch.device:
    """All that can be refused before text and model are there."""
    device = choose_device(config.device, ranks)
    if resume and resume.step == config.steps:
        raise InputError(f"--resume: the run is complete, with {resume.step} steps: to train on, give a larger --steps")
    if resume and resume.step > config.steps:
        raise InputError(f"--steps: expected more than the {resume.step} of the checkpoint, got {config.steps}")
    if config.batch_size % ranks.dp:
        raise InputError(
            f"--batch-size: expected a multiple of {ranks.dp}, one part for each data-parallel rank, "
            f"got {config.batch_size}"
        )
    if config.model.heads % ranks.tp or config.seq_len % ranks.tp:
        name, number = ("heads", config.model.heads) if config.model.heads % ranks.tp else ("tokens", config.seq_len)
        raise InputError(f"--tp: expected a divisor of the {number} {name}, got {ranks.tp}")
    check_memory(config, device, ranks)
    return device


def load_text(config: TrainConfig, resume: Checkpoint | None, ranks: Launch) -> Corpus:
    files = None if config.data is None else [Path(file) for file in config.data]
    corpora = []

    def load() -> str:
        corpora.append(load_corpus(files, vocab=config.model.vocab, seq=config.seq_len))
        return corpora[0].fingerprint

    # The first on each host learns the vocabulary; the others find it in the cache.
    ranks.each(lambda: None if ranks.local_rank else load())
    texts = ranks.each(lambda: corpora[0].fingerprint if corpora else load())
    if len(set(texts)) > 1:
        other = next(rank for rank, text in enumerate(texts) if text != texts[0])
        raise InputError(f"--data: expected the same text on all ranks, rank {other} has another than rank 0")
    if resume and resume.data_fingerprint != texts[0]:
        raise InputError("--resume: expected the text of the checkpoint, got another; name its files with --data")
    return corpora[0]


def build_model(config: TrainConfig, resume: Checkpoint | None, device: torch.device, ranks: Launch) -> GPT:
    if ranks.tp == 1:
        return build_whole(GPT, config, resume, device)
    from zofftk.split_gpt import SplitGPT, split

    # Cut when it has its values: those in a file of one rank are whole.
    return split(build_whole(SplitGPT, config, resume, device), ranks.mesh)


def build_whole(kind: type[G], config: TrainConfig, resume: Checkpoint | None, device: torch.device) -> G:
    model = build_gpt(config.model, seed=config.seed, dtype=TORCH_DTYPES[config.dtype], device=device, kind=kind)
    if resume:
        resume.check_model(config.model, model)
        resume.load_model(model)
    return model


def check_memory(config: TrainConfig, device: torch.device, ranks: Launch) -> None:
    """Refuses a model whose states alone exceed the host, before the system starts killing processes."""
    params = config.model.num_params * ranks.local_size
    itemsize = TORCH_DTYPES[config.dtype].itemsize
    bytes_per_param = (STATE_BYTES_PER_PARAM + itemsize) / ranks.size
    bytes_per_param += itemsize / ranks.tp if device.type == "cpu" else 0
    needed, usable = params * bytes_per_param / 2**30, usable_memory() / 2**30
    if needed > usable:
        raise InputError(
            f"--preset: expected a model that fits {usable:.1f} GiB of memory, {config.preset} needs {needed:.1f}"
        )
    if device.type == "cuda":
        usable = torch.cuda.get_device_properties(device).total_memory / 2**30
    if (needed := step_bytes(config) / ranks.size / 2**30) > usable:
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


def build_optimizer(model: nn.Module, config: TrainConfig, ranks: Launch | None = None) -> "OffloadAdamW":
    from zofftk import LossScale, OffloadAdamW

    ranks = ranks or Launch()
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
        process_group=ranks.process_group,
        rank_timeout_s=ranks.timeout_s,
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


def choose_device(name: str, ranks: Launch) -> torch.device:
    """auto: a GPU where torch has one and CuPy is there to reach it."""
    usable = torch.cuda.is_available() and find_spec("cupy") is not None
    if name == "cuda" and not usable:
        raise InputError("--device: expected a GPU that torch and CuPy can use, got cuda; see `zofftk doctor`")
    if not usable or name == "cpu":
        return torch.device("cpu")
    if ranks.local_rank >= torch.cuda.device_count():
        raise InputError(
            f"--nproc-per-node: expected at most one rank for each GPU, {torch.cuda.device_count()}, "
            f"got {ranks.local_size}; or give --device cpu"
        )
    return torch.device("cuda", ranks.local_rank)


def run_steps(training: Training, outputs: Outputs, console: Console) -> bool:
    """Steps until the last one or Ctrl-C; says whether it was Ctrl-C."""
    config, ranks, stops = training.config, training.ranks, False
    with (
        stop_on_interrupt(says=ranks.rank == 0) as stop,
        open_progress(console, config.steps, training.step) as show,
    ):
        while training.step < config.steps and not stops:
            with ranks.at(f"step {training.step + 1}"):
                sample = train_step(training)
                sample["loss"], stops = ranks.mean_loss(sample["loss"], stop=stop.made)
            training.samples.append(sample)
            show(sample, config.batch_size * config.seq_len)
            stops |= ranks.size == 1 and stop.made  # one alone need not wait for the next step to hear of it
            if outputs.save_every and training.step % outputs.save_every == 0:
                failures = []
                if not try_to(failures, save_run, outputs.checkpoint, training):
                    say(console, f"warning: no checkpoint after step {training.step}, going on: {failures[0]}")
    return training.step < config.steps


def train_step(training: Training) -> dict[str, Any]:
    """One batch through the model and the optimizer; loss and times are those of this rank."""
    config, step, ranks = training.config, training.step, training.ranks
    batch = training.corpus.batch(seed=config.seed, step=step, batch_size=config.batch_size, seq=config.seq_len)
    ids, targets = (whole.chunk(ranks.dp)[ranks.data_rank].to(training.device) for whole in batch)
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


def save_run(path: Path, training: Training) -> None:
    """Into one file; many ranks, which all call it, into one folder."""
    plain: dict[str, Any] = {
        "step": training.step,
        "config": asdict(training.config),
        "model_config": asdict(training.config.model),
        "data_fingerprint": training.corpus.fingerprint,
        "samples": training.samples,
        "schedule": training.schedule.state_dict(),
    }
    if training.ranks.size > 1:
        from zofftk.rank_checkpoint import save_rank_checkpoint

        save_rank_checkpoint(path, plain, training.model, training.optimizer, training.ranks)
        return
    model, optimizer = training.model.state_dict(), training.optimizer.state_dict()
    save_checkpoint(path, Checkpoint(**plain, model=model, optimizer=optimizer))


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
