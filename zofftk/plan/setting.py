"""How a model is trained, as far as its cost depends on it; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zofftk.errors import InputError

DTYPES = ("bf16", "fp32", "fp16")

# By name: what the optimizer is told. `overlap`: the model is handed over to `zofftk.offload`.
POLICIES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "synchronous, behind forward": {"overlap": True},
    "delayed": {"update": "delayed"},
    "delayed, behind forward": {"update": "delayed", "overlap": True},
    "delayed, inside backward": {"update": "delayed", "backwards_per_step": 1},
}
ONE_BACKWARD_ALONE = "delayed, inside backward"  # one rank, one backward a step


MOST = 1 << 40  # of any number here: what lies above is a slip


def _check_whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        raise InputError(f"{name}: expected a whole number of at least 1 and at most 2**40, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train a model.

    Attributes:
        micro_batch: sequences of one backward, on each of the ranks that train on different data.
        seq: tokens of a sequence.
        backwards: micro-batches a step.
        ranks: devices that train on different data and share the states (ZeRO-2).
        tp: devices that share each layer, for each of these ranks.
        recompute: layers run again in backward instead of keeping their activations.
        dtype: of the parameters.
        policy: a name of POLICIES: when the update runs, and behind what.
        bucket_bytes: of a bucket on the link; None: the engine's own choice.

    Raises:
        InputError: a number below 1, or a name that there is not.
    """

    micro_batch: int = 1
    seq: int = 1024
    backwards: int = 1
    ranks: int = 1
    tp: int = 1
    recompute: bool = False
    dtype: str = "bf16"
    policy: str = "synchronous"
    bucket_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("micro_batch", "seq", "backwards", "ranks", "tp"):
            _check_whole(name, getattr(self, name))
        if self.bucket_bytes is not None:
            _check_whole("bucket_bytes", self.bucket_bytes)
        if not isinstance(self.recompute, bool):
            raise InputError(f"recompute: expected True or False, got {self.recompute!r}")
        for name, known in (("dtype", DTYPES), ("policy", POLICIES)):
            if (value := getattr(self, name)) not in known:
                raise InputError(f"{name}: expected one of {'; '.join(known)}, got {value!r}")
        if self.policy == ONE_BACKWARD_ALONE and not self.is_one_backward_alone:
            raise InputError(f"policy: {self.policy!r} needs one rank and one backward a step")

    @property
    def is_one_backward_alone(self) -> bool:
        return self.ranks == 1 and self.backwards == 1

    @property
    def policies(self) -> list[str]:
        """Those that can be used with all else as it is."""
        return [name for name in POLICIES if name != ONE_BACKWARD_ALONE or self.is_one_backward_alone]

    @property
    def bucket_mib(self) -> float | None:
        return None if self.bucket_bytes is None else self.bucket_bytes / (1 << 20)

    @property
    def sequences_per_step(self) -> int:
        return self.micro_batch * self.backwards * self.ranks
