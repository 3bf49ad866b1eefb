"""All numbers that are free: what each means, where it starts, and what it is fitted on.

Everything else in a prediction is the profile's (datasheets and publications), the paper's, or the schedule's.
"""

from __future__ import annotations

from dataclasses import dataclass

from zofftk.baselines.prediction import TORCH_CPU_ADAM_NS

MACHINE = "v100-dgx2"
MICRO_BATCHES = "micro_batches."


@dataclass(frozen=True)
class FreeNumber:
    """`name` is a field of the profile, or `micro_batches.` and a figure, where it is a whole number.

    One that is `given` is read off a table and takes no part in the fit of the bars.
    """

    name: str
    meaning: str
    unit: str
    start: float
    lowest: float
    highest: float
    fitted_on: str
    given: bool = False

    @property
    def is_count(self) -> bool:
        return self.name.startswith(MICRO_BATCHES)


EFFICIENCY = "Fig. 14 PyTorch 1, Fig. 8 ZeRO-Offload 1B, 2B and 10B, Fig. 10 ZeRO-2 8B"
FREE_NUMBERS = (
    FreeNumber(
        "gpu.max_efficiency",
        "what a matrix product of 1e12 operations reaches of the tensor cores' peak",
        "share",
        0.55,
        0.3,
        0.9,
        EFFICIENCY,
    ),
    FreeNumber(
        "gpu.work_exponent",
        "how that grows with a product's work: (operations / 1e12) to this power",
        "exponent",
        0.1,
        0.01,
        0.5,
        EFFICIENCY,
    ),
    FreeNumber(
        "gpu.memory_efficiency",
        "what kernels that only move data, none of them fused, reach of the memory's bandwidth",
        "share",
        0.8,
        0.2,
        1.0,
        EFFICIENCY,
    ),
    FreeNumber(
        "interconnect.inside_gb_s",
        "what collectives of the time reach between the GPUs of a node, for each GPU and way",
        "GB/s",
        120.0,
        4.0,
        150.0,
        "Fig. 10 Megatron 8B, Fig. 11 ZeRO-Offload 16",
    ),
    FreeNumber(
        "interconnect.between_gb_s",
        "the same between nodes, for each node and way",
        "GB/s",
        80.0,
        2.0,
        100.0,
        "Fig. 11 ZeRO-Offload 128",
    ),
    FreeNumber(
        "micro_batches.fig14",
        "micro-batches a step in Fig. 14, which does not say",
        "count",
        8,
        1,
        16,
        "Fig. 14 Offload + PT-CPU Adam 8",
    ),
    FreeNumber(
        "host.adam_ns_per_param",
        "the release's Adam, with all cores of the node",
        "ns/parameter",
        0.26,
        0.26,
        0.26,
        "Table 4 CPU-Adam, its median",
        given=True,
    ),
    FreeNumber(
        "offload-torch-cpu.adam_ns_per_param",
        "torch's Adam on the CPU",
        "ns/parameter",
        TORCH_CPU_ADAM_NS,
        TORCH_CPU_ADAM_NS,
        TORCH_CPU_ADAM_NS,
        "Table 4 PT-CPU, its mean",
        given=True,
    ),
)
# Micro-batches a step of the other figures: not fitted.
COUNTS = {
    "fig8": "512 samples over the micro-batch, as the text says",
    "fig9": "1: the text compares a small batch, and does not accumulate",
    "fig10": "512 samples over ranks and micro-batch, as the text says",
    "fig11": "1: the same model is slower here than in Fig. 8 and 10, which accumulate",
}
# Figure, system, place on its axis: what the numbers above are fitted on.
ITEMS = (
    ("fig14", "PyTorch", "1"),
    ("fig14", "Offload + PT-CPU Adam", "8"),
    ("fig8", "ZeRO-Offload", "1B"),
    ("fig8", "ZeRO-Offload", "2B"),
    ("fig8", "ZeRO-Offload", "10B"),
    ("fig10", "ZeRO-2", "8B"),
    ("fig10", "Megatron", "8B"),
    ("fig11", "ZeRO-Offload", "16"),
    ("fig11", "ZeRO-Offload", "128"),
)
