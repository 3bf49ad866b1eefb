"""The table a run ends with: what was trained, where its bytes were, where its time went."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from zofftk.plan.training import Prediction
    from zofftk.report import StepReport

MIB = 1 << 20


def print_summary(
    console: Console,
    report: "StepReport",
    samples: Sequence[dict[str, Any]],
    prediction: "Prediction | None" = None,
) -> None:
    first, last = samples[0]["loss"], samples[-1]["loss"]
    table = Table(title="Run", show_header=False, title_justify="left")
    table.add_row("parameters", f"{report.num_params:,}")
    table.add_row("loss, first -> last step", f"{first:.3f} -> {last:.3f}")
    for row in (*byte_rows(report), *time_rows(report, samples), *predicted_rows(prediction)):
        table.add_row(*row)
    console.print(table)


def byte_rows(report: "StepReport") -> list[tuple[str, str]]:
    """Memory and traffic, each per parameter, so that runs of any size compare."""
    params, steps = report.num_params, max(1, report.steps)
    least = "minimum 2" if report.device_bytes == 2 * params else "2 with 16-bit parameters"

    def per_step(nbytes: int) -> str:
        return f"{nbytes / steps:,.0f} ({nbytes / steps / params:.3f} per parameter; {least})"

    return [
        ("bytes per parameter on the device", f"{report.device_bytes / params:.2f}"),
        ("  staging buffers beside them", f"{report.staging_bytes / MIB:.1f} MiB"),
        ("bytes per parameter on the host", f"{report.host_bytes / params:.2f}"),
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
