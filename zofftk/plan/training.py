"""The step time and the memory of `zofftk train`, predicted by a dry run on the profile of the machine it runs on."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from zofftk.errors import InputError
from zofftk.plan.setting import ONE_BACKWARD_ALONE, Setting
from zofftk.profile import THIS, load_profile, this_path
from zofftk.train_config import TrainConfig

HOW_TO = "to have it predicted, measure this machine once: zofftk doctor --measure"
NOT_SLICED = "not predicted where layers are shared by ranks: see zofftk plan --tp"


@dataclass(frozen=True)
class Prediction:
    """Of one rank. `step_ms` is None where there is none, for `reason`; `seconds` is how long it took to make.

    `device_bytes` and `host_bytes` are what the run takes beside the program itself, when most is taken. On a CPU both
    are the process's.
    """

    step_ms: float | None
    reason: str = ""
    seconds: float = 0.0
    device_bytes: int = 0
    host_bytes: int = 0


def predict(config: TrainConfig, *, dp: int, tp: int, ranks_here: int = 1) -> Prediction:
    """Of a step once the run has found its pace; not at all where this machine has no profile, or a damaged one.

    `ranks_here` ranks are on this host.
    """
    if not this_path().exists():
        return Prediction(None, HOW_TO)
    if tp > 1:
        return Prediction(None, NOT_SLICED)  # a mesh of virtual devices needs torch.distributed to itself
    from zofftk.plan.memory import RESERVED, SAVING
    from zofftk.plan.sources import preset_source
    from zofftk.plan.trials import Trials

    started_s = time.perf_counter()
    source = preset_source(config.preset)
    try:
        profile = load_profile(THIS)
    except InputError as error:  # no reason not to train
        return Prediction(None, str(error))
    trials, setting = Trials(source, profile.shared_by(ranks_here)), setting_of(config, source.default, dp)
    step, memory = trials.step(setting), trials.memory(setting)
    device, host = ({**each.items, RESERVED: 0, SAVING: 0} for each in (memory.device, memory.host))
    return Prediction(
        step.step_ms,
        seconds=time.perf_counter() - started_s,
        device_bytes=sum(device.values()),
        host_bytes=sum(host.values()) // min(dp, ranks_here),
    )


def setting_of(config: TrainConfig, default: Setting, dp: int) -> Setting:
    """As `zofftk train` builds its optimizer: it announces one backward a step."""
    policy = "synchronous"
    if config.update == "delayed":
        policy = ONE_BACKWARD_ALONE if dp == 1 else "delayed"
    batch = config.batch_size // dp
    return replace(default, micro_batch=batch, seq=config.seq_len, ranks=dp, dtype=config.dtype, policy=policy)
