"""The shape of a GPT-2-like model, without torch, so that the command line and the planner can read it quickly."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Two models with equal configurations have the same parameters, name by name and shape by shape."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden % self.heads:
            raise ValueError(f"hidden must be a multiple of heads, got hidden={self.hidden} and heads={self.heads}")

    @property
    def num_params(self) -> int:
        """Parameters of the whole model; the tied head adds none."""
        per_block = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * per_block + (self.vocab + self.seq + 2) * self.hidden
