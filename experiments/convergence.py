"""All measurements of convergence, one after the other, with one plan: the most telling runs come first."""

import argparse

from experiments import convergence_bert, convergence_gpt, convergence_sweep
from experiments.curves import command
from experiments.curves.report import report_finetuning, report_pretraining, report_sweep

add_arguments = command.add_arguments


def run(options: argparse.Namespace) -> int:
    parts = [
        (convergence_gpt.runs(quick=options.quick), report_pretraining),
        (convergence_sweep.runs(quick=options.quick), report_sweep),
        (convergence_bert.runs(quick=options.quick), report_finetuning),
    ]
    return command.carry_out(parts, options)
