"""The command line: reads options, hands over, and turns errors of the user's into one line."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from zofftk.dataflow.command import add_dataflow
from zofftk.errors import InputError, RankError
from zofftk.launch import Launch, launched
from zofftk.outputs import Outputs, run_folder
from zofftk.plan.command import add_plan
from zofftk.presets import PRESETS
from zofftk.train_config import DEVICES, DTYPES, UPDATES, TrainConfig

if TYPE_CHECKING:
    from zofftk.checkpoint import Checkpoint

OPERATION_FAILED = 1
USAGE_ERROR = 2
INTERRUPTED = 130


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"zofftk: error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        options = build_parser(bench="bench" in arguments[:1]).parse_args(arguments)
        return options.run(options)
    except BaseException as error:
        code = explain(error)
        if code is None:
            raise
        return code


def explain(error: BaseException, who: str = "zofftk") -> int | None:
    """Prints an error that is not this program's own fault in one line; the exit code, or None for others."""
    if isinstance(error, KeyboardInterrupt):
        print(f"{who}: interrupted", file=sys.stderr)
        return INTERRUPTED
    is_kernel = isinstance(error, ImportError) and error.name == "zofftk._cpu_adam"
    if not (is_kernel or isinstance(error, InputError | OSError | RankError)):
        return None
    notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    print(f"{who}: error: {error}{notes}", file=sys.stderr)
    return USAGE_ERROR if isinstance(error, InputError) else OPERATION_FAILED


def build_parser(*, bench: bool = False) -> argparse.ArgumentParser:
    parser = OneLineParser(prog="zofftk", description="Train models larger than the device: ZeRO-Offload for PyTorch.")
    parser.add_argument("--version", action="version", version=f"zofftk {version('zofftk')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_train(commands.add_parser("train", help="train a GPT-2-like model on text"))
    doctor = commands.add_parser("doctor", help="say what this machine offers and lacks")
    doctor.description = "Lists what the engine can use here, with one line of advice for each thing missing."
    doctor.add_argument("--measure", action="store_true", help="measure this machine too: the profile 'this'")
    doctor.set_defaults(run=run_doctor)
    add_plan(commands.add_parser("plan", help="say what a run costs, fits and takes, before it is started"))
    add_dataflow(commands.add_parser("dataflow", help="compare every placement of training's data on GPU and CPU"))
    add_bench(commands.add_parser("bench", help="measure a part of the engine"), chosen=bench)
    return parser


def add_train(parser: argparse.ArgumentParser) -> None:
    parser.description = "Trains a GPT-2-like model: optimizer on the host, 16-bit parameters on the device."
    parser.set_defaults(run=run_train)
    # An option that is not given leaves no attribute, so that a preset or a checkpoint decides.
    parser.argument_default = argparse.SUPPRESS
    what = parser.add_argument_group("what is trained")
    what.add_argument("--preset", choices=PRESETS, metavar="NAME", help=f"{', '.join(PRESETS)} (default: tiny)")
    what.add_argument("--data", nargs="+", metavar="FILE", help="UTF-8 text files (default: Python's standard library)")
    what.add_argument("--steps", type=int, metavar="N", help="optimizer steps (default: the preset's)")
    what.add_argument("--batch-size", type=int, metavar="N", help="sequences per step (default: the preset's)")
    what.add_argument("--seq-len", type=int, metavar="N", help="tokens per sequence (default: the preset's)")
    what.add_argument("--lr", type=float, metavar="X", help="peak learning rate (default: the preset's)")
    what.add_argument("--max-grad-norm", type=float, metavar="X", help="gradients are clipped to it (default: 1.0)")
    what.add_argument("--update", choices=UPDATES, help="delayed: one step late, beside compute (default: synchronous)")
    what.add_argument("--delay-after", type=int, metavar="N", help="synchronous steps before it (default: 40)")
    what.add_argument("--dtype", choices=DTYPES, help="of the parameters (default: bf16)")
    what.add_argument("--device", choices=DEVICES, help="auto: a GPU where torch and CuPy reach one (default: auto)")
    what.add_argument("--seed", type=int, metavar="N", help="of the initial weights and the batches (default: 0)")
    ranks = parser.add_argument_group("over many ranks (torchrun --nproc-per-node N -m zofftk train ...)")
    ranks.add_argument("--tp", type=int, metavar="T", help="ranks that share each layer, tensor-parallel (default: 1)")
    ranks.add_argument("--rank-timeout", type=float, metavar="S", help="seconds to wait for others (default: torch's)")
    where = parser.add_argument_group("what is kept")
    where.add_argument("--out", type=Path, metavar="FOLDER", help="parent of the run's folder (default: runs)")
    where.add_argument("--name", metavar="NAME", help="of the run's folder (default: preset and time)")
    where.add_argument("--save", type=Path, metavar="PATH", help="write a checkpoint here at the end")
    where.add_argument("--save-every", type=int, metavar="N", help="write the checkpoint every N steps as well")
    where.add_argument("--resume", type=Path, metavar="PATH", help="go on from a checkpoint; same --steps, same bits")


def add_bench(parser: argparse.ArgumentParser, *, chosen: bool) -> None:
    parser.description = "Measures a part of the engine on this machine."
    benches = parser.add_subparsers(title="benches", metavar="BENCH", required=True)
    cpu_adam = benches.add_parser("cpu-adam", help="CPU Adam in parameters per second")
    if chosen:
        # A bench brings its own options, and with them everything it imports.
        from zofftk.bench import cpu_adam as bench

        bench.add_arguments(cpu_adam)
        cpu_adam.set_defaults(run=bench.run)


def run_doctor(options: argparse.Namespace) -> int:
    calm_threads()
    from zofftk.doctor import run_doctor

    code = run_doctor()
    if not options.measure or code:
        return code  # what is required and lacks would be measured
    from rich.console import Console

    from zofftk.isa import check_isa
    from zofftk.measure import measure_this

    check_isa()
    return measure_this(Console())


def calm_threads() -> None:
    # Without this, torch's threads spin while they wait: one other busy thread on the machine then makes steps many
    # times slower (2 cores: 0.24 s to 2.5 s). Read when torch is first imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def run_train(options: argparse.Namespace) -> int:
    calm_threads()
    given = vars(options)
    ask = {"tp": given.get("tp", 1), "timeout_s": given.get("rank_timeout"), "device": given.get("device", "auto")}
    with launched(**ask, explain=explain) as ranks:
        return train_on(ranks, given)


def train_on(ranks: Launch, given: dict[str, Any]) -> int:
    asked = {field.name: given[field.name] for field in fields(TrainConfig) if field.name in given}
    if "data" in asked:
        asked["data"] = tuple(os.path.abspath(file) for file in asked["data"])
    checkpoint = load_any_checkpoint(given["resume"], ranks) if "resume" in given else None

    def configure() -> TrainConfig:
        if checkpoint is None:
            return TrainConfig.from_options(asked)
        return TrainConfig(**checkpoint.config).resumed_with(asked)

    def outputs() -> Outputs:
        folder = run_folder(given.get("out", Path("runs")), given.get("name"), config.preset)
        save, save_every = given.get("save"), given.get("save_every")
        return Outputs(folder=folder, save=save, save_every=save_every, of_ranks=ranks.size > 1)

    config = ranks.here(configure)
    kept = ranks.first(outputs)

    from zofftk.isa import check_isa

    ranks.each(check_isa)
    from zofftk.train import train

    return train(config, kept, resume=checkpoint, ranks=ranks)


def load_any_checkpoint(path: Path, ranks: Launch) -> "Checkpoint":
    """A file that one rank has written, or a folder that many have; either, on any number of ranks."""
    from zofftk.sharding.atomic_folder import found

    if ranks.first(lambda: found(path).is_dir()):
        from zofftk.rank_checkpoint import load_rank_checkpoint as load
    else:
        from zofftk.checkpoint import load_checkpoint as load
    return ranks.here(lambda: load(path))
