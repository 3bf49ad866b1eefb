"""Pre-training a GPT-2-like model from scratch on text, with a part of the text held out."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.curves.held_out import load_split
from experiments.curves.run import Run
from zofftk.gpt import build_gpt
from zofftk.gpt_config import GPTConfig

# By name; the names say millions of parameters.
MODELS = {
    "10.5m": GPTConfig(layers=5, hidden=384, heads=6, vocab=4096, seq=128),
    "1.3m": GPTConfig(layers=4, hidden=128, heads=4, vocab=4096, seq=128),
    "0.7m": GPTConfig(layers=2, hidden=128, heads=4, vocab=2048, seq=64),
    "quick": GPTConfig(layers=1, hidden=32, heads=2, vocab=256, seq=32),
}
BATCHES_ON_THE_WAY, BATCHES_AT_THE_END = 8, 64  # of held-out text, the same ones at every evaluation


class GPTTask:
    """The batch of a step depends on the run's seed and the step alone."""

    def __init__(self, run: Run) -> None:
        self.run, self.config = run, MODELS[run.model]
        self.training, self.held_out, self.data = load_split(self.config.vocab)

    def build(self) -> nn.Module:
        return build_gpt(self.config, seed=self.run.seed, dtype=torch.bfloat16)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        return model(*self.training.batch(**self._shape(), seed=self.run.seed, step=step))

    def evaluate(self, model: nn.Module, *, at_the_end: bool) -> dict[str, float]:
        """Mean loss on held-out text, in nats per token."""
        count = BATCHES_AT_THE_END if at_the_end else BATCHES_ON_THE_WAY
        batches = [self.held_out.batch(**self._shape(), seed=0, step=number) for number in range(count)]
        return {"held_out_loss": float(np.mean([model(*batch).item() for batch in batches]))}

    def describe(self) -> dict[str, Any]:
        """The text, and how often the run goes over it."""
        tokens = self.run.steps * self.run.batch_size * self.config.seq
        return self.data | {"epochs": tokens / len(self.training.tokens), "seq": self.config.seq}

    def _shape(self) -> dict[str, int]:
        return {"batch_size": self.run.batch_size, "seq": self.config.seq}
