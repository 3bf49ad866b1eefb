"""Figure 12: loss of pre-training, plain, offloaded and delayed, from the records of `convergence_gpt`.

GPT-2-like models that two cores can train, on source text; the paper's are not stated but for their 100,000 steps.
"""

import argparse

from experiments import convergence_gpt, loss_curves
from experiments.curves.report import held_out_loss, report_pretraining, training_loss
from experiments.record import keep

MEASURES = {"training loss": training_loss, "held-out loss": held_out_loss}

add_arguments = loss_curves.add_arguments


def run(options: argparse.Namespace) -> int:
    records = loss_curves.gather(convergence_gpt, options)
    results = loss_curves.summarise(records, MEASURES)
    report = report_pretraining(records)
    print("\n".join(report))
    names = [f"{record['config']['experiment']}/{record['config']['model']}" for record in records]
    config = {"of": sorted(set(names)), "made on": records[0].get("hardware")}
    config |= loss_curves.counted(convergence_gpt, records)
    print("record:", keep("fig12", config, None, results | {"report": report}))
    return 0
