"""Fine-tuning a pre-trained BERT to tell the topic of a text."""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.curves.minilm import load_minilm
from experiments.curves.run import Run
from experiments.curves.topics import PACKAGES, load_topics

LENGTH = 64  # tokens of a text; few paragraphs are longer
TEST_BATCH = 32
TEXTS_ON_THE_WAY = 64  # of the test
# By name of the model, which is one and the same: where texts come from.
PACKAGES_OF = {"minilm": PACKAGES, "quick": ("networkx", "numpy")}


class BertTask:
    """The texts of a step and its dropout depend on the run's seed and the step alone."""

    def __init__(self, run: Run) -> None:
        self.run, self.topics, self.pretrained = run, load_topics(PACKAGES_OF[run.model]), load_minilm()
        self.ids = self.pretrained.encode(self.topics.training.texts, length=LENGTH)
        self.labels = torch.tensor(self.topics.training.labels)

    def build(self) -> nn.Module:
        return self.pretrained.build(topics=len(self.topics.names), seed=self.run.seed, dtype=torch.bfloat16)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        chosen = self.order(step)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.run.seed * 1_000_003 + step)  # of dropout
            logits = logits_of(model, self.ids[chosen])
        return F.cross_entropy(logits, self.labels[chosen])

    def order(self, step: int) -> Tensor:
        """The texts of a step: each once an epoch, in an order of the epoch's own; an odd rest is left out."""
        per_epoch = len(self.labels) // self.run.batch_size
        epoch, place = divmod(step, per_epoch)
        order = np.random.default_rng((self.run.seed, epoch)).permutation(len(self.labels))
        return torch.from_numpy(order[place * self.run.batch_size :][: self.run.batch_size])

    def evaluate(self, model: nn.Module, *, at_the_end: bool) -> dict[str, float]:
        """Loss, accuracy and macro F1 on the test texts; on the way, on a part of them."""
        whole = at_the_end and self.run.model != "quick"
        count = len(self.test_labels) if whole else TEXTS_ON_THE_WAY
        # Topics stand one after the other, so a part is taken at even distances.
        chosen = torch.linspace(0, len(self.test_labels) - 1, count).long()
        batches = self.test_ids[chosen].split(TEST_BATCH)
        logits, labels = torch.cat([logits_of(model, ids) for ids in batches]), self.test_labels[chosen]
        guesses = logits.argmax(-1)
        return {
            "held_out_loss": F.cross_entropy(logits, labels).item(),
            "accuracy": (guesses == labels).double().mean().item(),
            "macro_f1": macro_f1(guesses, labels),
        }

    def describe(self) -> dict[str, Any]:
        epochs = self.run.steps * self.run.batch_size / len(self.labels)
        return self.topics.describe() | self.pretrained.description | {"epochs": epochs, "length": LENGTH}

    @cached_property
    def test_ids(self) -> Tensor:
        return self.pretrained.encode(self.topics.test.texts, length=LENGTH)

    @cached_property
    def test_labels(self) -> Tensor:
        return torch.tensor(self.topics.test.labels)


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    longest = int((ids != 0).sum(1).max())  # columns of nothing but filling are left out
    ids = ids[:, :longest]
    return model(input_ids=ids, attention_mask=(ids != 0).long()).logits.float()


def macro_f1(guesses: Tensor, labels: Tensor) -> float:
    """Mean over the topics that occur of the harmonic mean of precision and recall."""
    scores = []
    for topic in labels.unique():
        hits = ((guesses == topic) & (labels == topic)).sum().item()
        scores.append(2 * hits / ((guesses == topic).sum().item() + (labels == topic).sum().item()))
    return float(np.mean(scores))
