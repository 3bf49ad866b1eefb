"""Step time and memory that `zofftk train` predicts, against what its runs on this machine then take.

Each run is a process of its own (or one for each rank), which predicts from the machine's profile before its model is
built. Time is the median step of the second half; memory is the peak of rank 0, less what the program held before.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.record import keep
from experiments.verdict import verdict
from zofftk.profile import this_path

ALLOWED_TIME, ALLOWED_MEMORY = 0.20, 0.10  # medians of the errors
MIB = 1 << 20


@dataclass(frozen=True)
class Run:
    preset: str
    steps: int
    batch_size: int
    options: tuple[str, ...] = ()
    ranks: int = 1

    @property
    def name(self) -> str:
        options = " ".join(option.removeprefix("--") for option in self.options)
        return f"{self.preset}, batch {self.batch_size}{', ' + options if options else ''}, {self.ranks} rank(s)"


DELAYED = ("--update", "delayed", "--delay-after", "2")
ON_CPU = (
    Run("tiny", 200, 4),
    Run("demo", 20, 16),
    Run("demo", 40, 4, ("--dtype", "fp32")),
    Run("demo", 20, 16, DELAYED),
    Run("demo", 20, 16, ranks=2),
    Run("24m", 8, 4),
    Run("24m", 16, 1),
    Run("24m", 10, 2, ("--dtype", "fp32")),
    Run("24m", 10, 2, DELAYED),
    Run("24m", 8, 2, ("--seq-len", "512")),
    Run("24m", 8, 4, ranks=2),
    Run("24m", 8, 4, DELAYED, ranks=2),
)
ON_GPU = (
    Run("demo", 40, 64),
    Run("24m", 40, 32),
    Run("24m", 40, 32, DELAYED),
    Run("1b", 6, 8),
    Run("1b", 6, 32),
    Run("1b", 6, 32, DELAYED),
    Run("2b", 5, 32),
    Run("2b", 5, 8, DELAYED),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep-profile", action="store_true", help="use the profile there is: do not measure again")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose name has TEXT")


def run(options: argparse.Namespace) -> int:
    if not (options.keep_profile and this_path().exists()):
        subprocess.run([sys.executable, "-m", "zofftk", "doctor", "--measure"], check=True)
    runs = [each for each in (ON_GPU if torch.cuda.is_available() else ON_CPU) if options.only in each.name]
    samples = []
    for each in runs:
        samples.append({"run": each.name} | measured(each))
        print(row(samples[-1]), flush=True)
    results = compare(samples)
    time, memory = (results[f"median error of {what}"] for what in ("step time", "memory"))
    are_met = time <= ALLOWED_TIME, memory <= ALLOWED_MEMORY
    print(f"required: step time within {ALLOWED_TIME:.0%}: {time:.1%}, {verdict(are_met[0])}")
    print(f"required: memory within {ALLOWED_MEMORY:.0%}: {memory:.1%}, {verdict(are_met[1], timed=False)}")
    profile = this_path().read_text()
    print("record:", keep("planned", {"only": options.only, "profile": profile}, samples, results))
    return 0 if all(are_met) else 1


def measured(run: Run) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        program = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.ranks}"]
        command = [sys.executable, *(program if run.ranks > 1 else []), "-m", "zofftk", "train", "--out", folder]
        command += ["--name", "run", "--preset", run.preset, "--steps", str(run.steps)]
        done = subprocess.run(
            [*command, "--batch-size", str(run.batch_size), *run.options], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{run.name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        record = json.loads((Path(folder) / "run" / "record.json").read_text())
    prediction, memory, steps = record["prediction"], record["memory"], record["samples"]
    predicted_bytes = prediction["device_bytes"] + prediction["host_bytes"]
    if record["hardware"]["gpus"]:
        predicted_bytes, memory = prediction["device_bytes"], {"before_bytes": 0, "peak_bytes": memory["device_bytes"]}
    return {
        "predicted_ms": prediction["step_ms"],
        "measured_ms": statistics.median(step["step_ms"] for step in steps[len(steps) // 2 :]),
        "predicted_bytes": predicted_bytes,
        "measured_bytes": memory["peak_bytes"] - memory["before_bytes"],
        "program_bytes": memory["before_bytes"],
        "prediction_seconds": prediction["seconds"],
        "steps_ms": [step["step_ms"] for step in steps],
    }


def error_of(sample: dict[str, Any], what: str) -> float:
    return sample[f"predicted_{what}"] / sample[f"measured_{what}"] - 1


def row(sample: dict[str, Any]) -> str:
    time = f"{sample['predicted_ms']:9.1f} ms{sample['measured_ms']:9.1f} ms{error_of(sample, 'ms'):+7.0%}"
    memory = f"{sample['predicted_bytes'] / MIB:9.0f} MiB{sample['measured_bytes'] / MIB:9.0f} MiB"
    return f"{sample['run']:58}{time}{memory}{error_of(sample, 'bytes'):+7.0%}"


def compare(samples: list[dict[str, Any]]) -> dict[str, float]:
    return {
        f"median error of {name}": statistics.median(abs(error_of(sample, what)) for sample in samples)
        for name, what in (("step time", "ms"), ("memory", "bytes"))
    }
