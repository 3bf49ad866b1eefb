"""Figure 13: loss of fine-tuning with the delayed update and without, from the records of `convergence_bert`.

A pre-trained BERT of 22.7 M parameters learns topics; the paper's BERT-large learns SQuAD.
"""

import argparse

from experiments import convergence_bert, loss_curves
from experiments.curves.report import held_out_loss, report_finetuning, result, training_loss
from experiments.record import keep

MEASURES = {
    "training loss": training_loss,
    "test loss": held_out_loss,
    "macro F1": result("macro_f1"),
    "accuracy": result("accuracy"),
}

add_arguments = loss_curves.add_arguments


def run(options: argparse.Namespace) -> int:
    records = loss_curves.gather(convergence_bert, options)
    results = loss_curves.summarise(records, MEASURES, **{"macro F1": "share", "accuracy": "share"})
    report = report_finetuning(records)
    print("\n".join(report))
    config = loss_curves.counted(convergence_bert, records) | {
        "data": records[0]["data"],
        "made on": records[0].get("hardware"),
    }
    print("record:", keep("fig13", config, None, results | {"report": report}))
    return 0
