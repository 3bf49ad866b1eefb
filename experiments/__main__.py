"""python -m experiments NAME [options]; without a name, what there is"""

import argparse
import importlib
import sys

# Name: what it measures. Each is a module here with add_arguments(parser) and run(options) -> exit code.
EXPERIMENTS = {
    "step_time": "a step with the engine against one with torch's fused AdamW on 16-bit parameters",
    "host_memory": "host memory the engine adds to a step, against what its states need",
    "hook_overhead": "host time of the gradient hooks, per parameter",
    "gpu_check": "kernels, copies and training steps on a CUDA GPU",
    "overlap": "what of transfers and update is hidden behind compute, on a timed device",
    "scaling_measured": "bytes and times of every rank on 1, 2 and 4 processes of this machine",
    "delayed": "the delayed update where Adam takes three quarters of compute, on a timed device",
    "convergence_gpt": "loss curves of GPT-2-like models: plain, offloaded, delayed; three seeds, resumable",
    "convergence_sweep": "final losses with the delay, by learning rate and optimizer; resumable",
    "convergence_bert": "a pre-trained BERT fine-tuned with the delay and without; needs the extra `experiments`",
    "convergence": "the three before in one, about 90 minutes on two cores: --plan lists their runs",
    "planned": "step time and memory that a run predicts, against what it takes",
    "fig7": "the largest model that each system trains, predicted, against the paper",
    "calibration": "the free numbers of figures 8 to 14, fitted on a few named bars",
    "fig8": "throughput on one GPU by size of model, predicted, against the paper",
    "fig9": "the delayed update on one GPU, predicted, against the paper",
    "fig10": "throughput of each of 16 GPUs by size of model, predicted, against the paper",
    "fig11": "throughput of each of 1 to 128 GPUs, predicted, against the paper",
    "fig14": "what each part of ZeRO-Offload brings, predicted, against the paper",
    "scores": "errors, orders and memory of figures 8 to 14, predicted, against the paper",
    "throughput_small": "Figures 8, 9 and 14 in small: steps on an emulated V100, slowed, beside their dry runs",
}


def main() -> int:
    if not sys.argv[1:]:
        print(listing())
        return 0
    parser = argparse.ArgumentParser(prog="python -m experiments", description="Measurements, each kept as a record.")
    commands = parser.add_subparsers(title="experiments", metavar="NAME", required=True)
    for name, measures in EXPERIMENTS.items():
        module = importlib.import_module(f"experiments.{name}")
        command = commands.add_parser(name, help=measures, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args()
    return options.run(options)


def listing() -> str:
    lines = [f"  {name:20}{measures}" for name, measures in EXPERIMENTS.items()]
    return "\n".join(
        [
            "Measurements; each prints its figures and keeps them under experiments/results:",
            *lines,
            "Run one with `python -m experiments NAME`; its options: `python -m experiments NAME --help`.",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
