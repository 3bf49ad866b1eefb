"""The table a run ends with."""

from io import StringIO

from rich.console import Console

from zofftk.report import StepReport
from zofftk.summary import byte_rows, print_summary, time_rows


def test_the_labels_of_the_summary_fit_a_narrow_terminal():
    console = Console(file=StringIO(), width=80)
    sizes = {"num_params": 24_000_000, "device_bytes": 48_000_000, "staging_bytes": 16 << 20, "host_bytes": 336_000_000}
    times = {"wait_gradients_ms": 12.0, "adam_ms": 30.0, "adam_busy_ms": 30.0, "copy_back_ms": 5.0}
    report = StepReport(**sizes, **times, steps=1, bytes_down=48_000_000, bytes_up=48_000_000)
    samples = [{"loss": 8.0, "step_ms": 1100.0, "forward_ms": 300.0, "backward_ms": 600.0}]
    print_summary(console, report, samples)
    for label, _ in [*byte_rows(report), *time_rows(report, samples)]:
        assert f" {label} " in console.file.getvalue()
