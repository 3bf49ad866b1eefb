"""The table a run ends with: what was trained, where its bytes were, where its time went."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from zofftk.plan.training import Prediction
    from zofftk.report import StepReport

MIB = 1 << 20


@dataclass(frozen=True)
class Sharing:
    """`tp` ranks share the parameters of the model, `dp` the states and the traffic of the same parameters."""

    model_params: int
    dp: int
    tp: int


def print_summary(
    console: Console,
    report: "StepReport",
    samples: Sequence[dict[str, Any]],
    sharing: Sharing | None = None,
    prediction: "Prediction | None" = None,
) -> None:
    """`report` and the times in `samples` are those of this rank; the losses are of all."""
    sharing = sharing or Sharing(report.num_params, 1, 1)
    first, last, size = samples[0]["loss"], samples[-1]["loss"], sharing.dp * sharing.tp
    title = "Run" if size == 1 else f"Run over {size} ranks; bytes and times are those of rank 0"
    table = Table(title=title, show_header=False, title_justify="left")
    if sharing.tp > 1:
        table.add_row("parameters", f"{sharing.model_params:,}, of which {report.num_params:,} on this rank")
    else:
        table.add_row("parameters", f"{report.num_params:,}")
    table.add_row("loss, first -> last step", f"{first:.3f} -> {last:.3f}")
    for row in (*byte_rows(report, sharing.dp), *time_rows(report, samples), *predicted_rows(prediction)):
        table.add_row(*row)
    console.print(table)


def byte_rows(report: "StepReport", dp: int = 1) -> list[tuple[str, str]]:
    """Memory and traffic, each per parameter on this rank, so that runs of any size compare.

    One of `dp` ranks has so much less of the states, and sends and takes so much less over its link.
    """
    params, steps = report.num_params, max(1, report.steps)
    share = f"{2 / dp:.3g}"
    least = f"minimum {share}" if report.device_bytes == 2 * params else f"{share} with 16-bit parameters"
    of_all = "" if dp == 1 else f" (1/{dp} of the states)"

    def per_step(nbytes: int) -> str:
        return f"{nbytes / steps:,.0f} ({nbytes / steps / params:.3f} per parameter; {least})"

    return [
        ("bytes per parameter on the device", f"{report.device_bytes / params:.2f}"),
        ("  staging buffers beside them", f"{report.staging_bytes / MIB:.1f} MiB"),
        ("bytes per parameter on the host", f"{report.host_bytes / params:.2f}{of_all}"),
        ("bytes down per step", per_step(report.bytes_down)),
        ("bytes up per step", per_step(report.bytes_up)),
    ]


def time_rows(report: "StepReport", samples: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """The mean step of this process, part by part; the parts are spans of one thread and do not overlap."""
    recent = samples[-report.steps :] if report.steps else []
    if not recent:
        return []
    whole = sum(sample["step_ms"] for sample in recent) / len(recent)
    parts = {
        "forward + backward": sum(sample["forward_ms"] + sample["backward_ms"] for sample in recent) / len(recent),
        "waiting for gradients": report.wait_gradients_ms / report.steps,
        "Adam": report.adam_ms / report.steps,
        "copy-back": report.copy_back_ms / report.steps,
    }
    parts["rest (schedule, zero_grad)"] = whole - sum(parts.values())
    rows = [("mean step", f"{whole:.1f} ms")]
    return rows + [(f"  {name}", f"{part:.1f} ms ({part / whole:.0%})") for name, part in parts.items()]


def predicted_rows(prediction: "Prediction | None") -> list[tuple[str, str]]:
    """What a dry run on this machine's profile said of the mean step."""
    if prediction is None:
        return []
    said = prediction.reason if prediction.step_ms is None else f"{prediction.step_ms:.1f} ms"
    return [("predicted step", said)]
