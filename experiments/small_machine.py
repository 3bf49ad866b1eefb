"""A machine of a profile made slow, and a model of its size made small, so that a step does the same on two cores.

Two numbers do it. The machine's speeds (operations, bytes, updates a second) are divided by `SLOWER`. The model's
parameters are divided by `fewer`, which is what leaves a small model of `BLOCKS` equal blocks. So everything in a step
takes `SLOWER / fewer` times as long as on the machine itself, and stays in proportion: what compute takes comes from a
dry run of the large model's layers, and link and update follow from the number of parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from zofftk.baselines import gpu_adam
from zofftk.baselines.workload import record_workload
from zofftk.gpt_config import GPTConfig
from zofftk.profile import Profile
from zofftk.virtual.events import Event, Spent

SLOWER = 768.0
BLOCKS = 10
BLOCK_NUMEL = 32 * 1024
GPU_ADAM_BYTES = (
    gpu_adam.WIDEN_BYTES + gpu_adam.NORM_BYTES + gpu_adam.SCALE_BYTES + gpu_adam.ADAM_BYTES + gpu_adam.NARROW_BYTES
)  # of a parameter, read and written where the update runs on the device


def slowed(profile: Profile, scale: float, *, adam_ns_per_param: float | None = None) -> Profile:
    """The machine at 1 / `SLOWER` of its speed; what an operation takes beside its work becomes `scale` of it."""
    gpu, link, host = profile.gpu, profile.link, profile.host
    return replace(
        profile,
        name=f"{profile.name}, {SLOWER:g} times slower",
        gpu=replace(
            gpu,
            peak_16bit_tflops=gpu.peak_16bit_tflops / SLOWER,
            peak_32bit_tflops=gpu.peak_32bit_tflops / SLOWER,
            memory_gb_s=gpu.memory_gb_s / SLOWER,
            kernel_us=gpu.kernel_us * scale,
        ),
        link=replace(
            link,
            down_gb_s=link.down_gb_s / SLOWER,
            up_gb_s=link.up_gb_s / SLOWER,
            latency_us=link.latency_us * scale,
        ),
        host=replace(
            host,
            memory_gb_s=host.memory_gb_s / SLOWER,
            adam_ns_per_param=(adam_ns_per_param or host.adam_ns_per_param) * SLOWER,
            task_us=host.task_us * scale,
        ),
    )


@dataclass(frozen=True)
class SmallModel:
    """A chain: an embedding, equal blocks, and a head without parameters of its own, as where it is tied.

    Times are of one micro-batch on the slow machine.
    """

    fewer: float  # the large model's parameters, for each of these
    embedding_numel: int
    block_numel: int
    embedding_ns: tuple[int, int]  # forward and backward
    block_ns: tuple[int, int]
    head_ns: int  # forward and backward in one
    tflop: float  # of the large model's micro-batch, by the paper's formula

    @property
    def scale(self) -> float:
        """Times that a step takes of what the large one does on the machine itself."""
        return SLOWER / self.fewer

    @property
    def numel(self) -> int:
        return self.embedding_numel + BLOCKS * self.block_numel

    @property
    def compute_ns(self) -> int:
        return sum(self.embedding_ns) + BLOCKS * sum(self.block_ns) + self.head_ns


@lru_cache
def small_model(config: GPTConfig, micro_batch: int, profile: Profile) -> SmallModel:
    """That does to the slow machine what a model of `config` does to the machine of `profile`."""
    large = record_workload(config, micro_batch, 1, profile)
    in_blocks = large.params_of(0) * config.layers
    fewer = in_blocks / (BLOCKS * BLOCK_NUMEL)
    ns = {(part.name, part.layer): _spent_ns(events) for part, events in large.parts.items()}
    scale, middle = SLOWER / fewer, config.layers // 2
    layers_a_block = config.layers / BLOCKS
    return SmallModel(
        fewer=fewer,
        embedding_numel=round((large.num_params - in_blocks) / fewer),
        block_numel=BLOCK_NUMEL,
        embedding_ns=(round(scale * ns["before", -1]), round(scale * ns["after", -1])),
        block_ns=(
            round(scale * layers_a_block * ns["forward", middle]),
            round(scale * layers_a_block * ns["backward", middle]),
        ),
        head_ns=round(scale * ns["between", -1]),
        tflop=96 * micro_batch * config.seq * config.layers * config.hidden**2 / 1e12,
    )


def _spent_ns(events: list[Event]) -> int:
    return sum(event.ns for event in events if isinstance(event, Spent))
