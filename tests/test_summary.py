"""The table a run ends with."""

from io import StringIO

from rich.console import Console

from zofftk.report import StepReport
from zofftk.summary import Sharing, byte_rows, print_summary, time_rows


def a_report(**changed):
    sizes = {"num_params": 24_000_000, "device_bytes": 48_000_000, "staging_bytes": 16 << 20, "host_bytes": 336_000_000}
    times = {"wait_gradients_ms": 12.0, "adam_ms": 30.0, "adam_busy_ms": 30.0, "copy_back_ms": 5.0}
    traffic = {"steps": 1, "bytes_down": 48_000_000, "bytes_up": 48_000_000}
    return StepReport(**sizes | times | traffic | changed)


SAMPLES = [{"loss": 8.0, "step_ms": 1100.0, "forward_ms": 300.0, "backward_ms": 600.0}]


def printed(report, *sharing):
    console = Console(file=StringIO(), width=80)
    print_summary(console, report, SAMPLES, *sharing)
    return " ".join(console.file.getvalue().replace("│", " ").split())


def test_the_labels_of_the_summary_fit_a_narrow_terminal():
    report = a_report()
    shown = printed(report)
    for label, _ in [*byte_rows(report), *time_rows(report, SAMPLES)]:
        assert f" {label.strip()} " in shown
    assert "(2.000 per parameter; minimum 2)" in shown
    assert "ranks" not in shown


def test_over_ranks_the_minimum_is_one_ranks_and_the_parameters_are_the_models():
    report = a_report(host_bytes=84_000_000, bytes_down=12_100_000, bytes_up=12_100_000)
    shown = printed(report, Sharing(46_000_000, 4, 2))
    assert "Run over 8 ranks; bytes and times are those of rank 0" in shown
    assert "parameters 46,000,000, of which 24,000,000 on this rank" in shown
    assert "(0.504 per parameter; minimum 0.5)" in shown
    assert "bytes per parameter on the host 3.50 (1/4 of the states)" in shown
