"""Our own engine on the model that the other systems run: the engine itself, dry-run."""

from __future__ import annotations

from typing import Any

from zofftk.baselines.gpt_2020 import GPT2020
from zofftk.baselines.workload import DTYPE, Workload, model_loss
from zofftk.virtual.counts import Counts
from zofftk.virtual.dry_run import dry_run_of
from zofftk.virtual.durations import Durations
from zofftk.virtual.rehearsal import Rehearsal


def run_own_engine(
    workload: Workload, durations: Durations, micro_batches: int, **options: Any
) -> tuple[Counts, dict[str, int], dict[str, int]]:
    """A step, what is on the device when most is, and what is on the host; options are those of `dry_run`."""
    config = workload.config
    rehearsal = Rehearsal(
        lambda: GPT2020(config, workload.slices),
        model_loss(workload.micro_batch, config.seq),
        durations,
        dtype=DTYPE,
        recorded=workload.few,
    )
    result = dry_run_of(rehearsal, backwards=micro_batches, **options)
    on_device = {
        "16-bit parameters": result.device.parameters,
        "activations": result.device.activations,
        "gradients that wait": result.device.gradients,
        "staging slots": result.device.engine,
    }
    return result.step, on_device, {"states and wire": result.host_bytes}
