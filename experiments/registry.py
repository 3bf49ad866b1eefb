"""What can be run: the tables and figures of the paper, and measurements beside them.

Each name is a module here with add_arguments(parser) and run(options) -> exit code. Nothing is imported to list them.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["computed", "simulated", "measured", "simulated and measured"]


@dataclass(frozen=True)
class Item:
    """One table or figure. Minutes are those of two cores without a GPU.

    `kind`: "computed" follows from definitions alone; "simulated" is the engine's own schedule, or that of a compared
    system, on a virtual device with the clock of a hardware profile; "measured" is timed on the machine it runs on.
    """

    title: str
    kind: Kind
    minutes: float
    quick_minutes: float


# In the order that `all` runs them: what is quick first, timings when nothing else is left to do for long.
ITEMS: dict[str, Item] = {
    "table1": Item("GPU memory of the placements with the least traffic", "computed", 0.1, 0.1),
    "fig2": Item("the data-flow graph and its cut", "computed", 0.1, 0.1),
    "fig4": Item("what each rank holds, by the engine's own partition", "computed", 0.1, 0.1),
    "table2": Item("the machine: the paper's, its profile, and this one", "simulated and measured", 0.6, 0.6),
    "fig3": Item("one GPU: a step on the engine's streams", "simulated", 0.2, 0.1),
    "fig5": Item("several GPUs: a step of one rank", "simulated", 0.2, 0.1),
    "fig6": Item("the delayed update on the engine's streams", "simulated", 0.2, 0.1),
    "table3": Item("the models, and what they need of a device", "simulated", 3, 0.3),
    "fig7": Item("the largest model that each system trains", "simulated", 3, 0.3),
    "calibration": Item("the simulation's free numbers, and what they were fitted on", "simulated", 6, 0.3),
    "fig8": Item("throughput on one GPU", "simulated", 4, 0.3),
    "fig9": Item("throughput with the delayed update and without", "simulated", 1, 0.3),
    "fig10": Item("throughput on the 16 GPUs of a node", "simulated", 5, 0.3),
    "fig11": Item("throughput on 1 to 128 GPUs", "simulated", 1, 0.3),
    "fig14": Item("throughput by batch size, technique by technique", "simulated", 1, 0.3),
    "scores": Item("how near the predicted figures come: errors, orders, memory", "simulated", 0.1, 0.1),
    "fig12": Item("loss curves of pre-training with the delayed update and without", "measured", 0.1, 0.2),
    "fig13": Item("loss curves of fine-tuning with the delayed update and without", "measured", 0.1, 0.2),
    "delay_rates": Item("final losses with the delay, by learning rate and optimizer", "measured", 0.1, 0.2),
    "throughput_small": Item(
        "the throughput figures in small, on the emulated device", "simulated and measured", 4, 0.5
    ),
    "table4": Item("latency of one Adam step on the CPU", "measured", 2.5, 0.3),
}

MEASUREMENTS: dict[str, str] = {
    "step_time": "a step with the engine against one with torch's fused AdamW on 16-bit parameters",
    "host_memory": "host memory the engine adds to a step, against what its states need",
    "hook_overhead": "host time of the gradient hooks, per parameter",
    "gpu_check": "kernels, copies and training steps on a CUDA GPU",
    "overlap": "what of transfers and update is hidden behind compute, on a timed device",
    "scaling_measured": "bytes and times of every rank on 1, 2 and 4 processes of this machine",
    "delayed": "the delayed update where Adam takes three quarters of compute, on a timed device",
    "convergence_gpt": "loss curves of GPT-2-like models: plain, offloaded, delayed; three seeds, resumable",
    "convergence_sweep": "the runs behind `delay_rates`: three optimizers, three to five learning rates, three seeds",
    "convergence_bert": "a pre-trained BERT fine-tuned with the delay and without; needs the extra `experiments`",
    "convergence": "the three before in one, about two hours on two cores: --plan lists their runs",
    "planned": "step time and memory that a run predicts, against what it takes",
}


def described() -> dict[str, str]:
    """What each name shows."""
    items = {name: f"{item.title} ({item.kind})" for name, item in ITEMS.items()}
    return items | MEASUREMENTS
