"""Training steps of the engine on the virtual device, with every span of its streams."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch

from zofftk.offload_adam import OffloadAdamW
from zofftk.plan.sources import preset_source
from zofftk.plan.step_parts import stage_of
from zofftk.profile import load_profile
from zofftk.virtual.dry_run import training
from zofftk.virtual.durations import Durations
from zofftk.virtual.rehearsal import Rehearsal


@dataclass(frozen=True)
class Rehearsed:
    """`ranks` devices of `profile` train a preset; `options` are the optimizer's."""

    model: str
    profile: str
    micro_batch: int
    bucket_bytes: int
    steps: int
    ranks: int = 1
    layers: int | None = None  # None: the preset's

    def run(self, **options: Any) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
        """Spans with their stage in ms, and where each step begins and ends on the stream of the model."""
        source = preset_source(self.model)
        setting = replace(source.default, micro_batch=self.micro_batch, ranks=self.ranks)
        rehearsal = Rehearsal(
            lambda: source.build(self.layers, setting, None),
            lambda model: source.loss(model, setting),
            Durations(load_profile(self.profile), self.ranks),
            dtype=torch.bfloat16,
            keep_spans=True,
        )
        rehearsal.device.trace.spans = deque()  # all of them, however many
        steps = []
        with training(rehearsal, OffloadAdamW, overlap=False, bucket_bytes=self.bucket_bytes, **options) as optimizer:
            for number in range(1, self.steps + 1):
                began_ms = _now_ms(rehearsal)
                rehearsal.program.micro_batch()
                optimizer.step()
                optimizer.zero_grad()
                steps.append({"step": number, "start_ms": began_ms, "stop_ms": _now_ms(rehearsal)})
            rule = optimizer.rule.name
        rehearsal.device.collect_spans()
        spans = [
            {
                "lane": span.lane,
                "stage": stage,
                "label": span.label,
                "start_ms": round(1e3 * span.start_s, 3),
                "stop_ms": round(1e3 * span.stop_s, 3),
                "nbytes": span.nbytes,
            }
            for span in rehearsal.device.trace.spans
            if (stage := stage_of(span, rule)) is not None
        ]
        return spans, steps


def _now_ms(rehearsal: Rehearsal) -> float:
    """As exact as the spans are."""
    return round(rehearsal.counts().ns / 1e6, 3)


def of_step(spans: list[dict[str, Any]], step: dict[str, float], *stages: str) -> list[dict[str, Any]]:
    """Of these stages, what begins in a step."""
    return [
        span for span in spans if span["stage"] in stages and step["start_ms"] <= span["start_ms"] < step["stop_ms"]
    ]


def first_ms(spans: list[dict[str, Any]]) -> float:
    return min(span["start_ms"] for span in spans)


def last_ms(spans: list[dict[str, Any]]) -> float:
    return max(span["stop_ms"] for span in spans)


def overlap_ms(ones: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """How long both are under way; spans of either follow one another."""
    return sum(
        max(0.0, min(one["stop_ms"], other["stop_ms"]) - max(one["start_ms"], other["start_ms"]))
        for one in ones
        for other in others
    )


def total_ms(spans: list[dict[str, Any]]) -> float:
    return sum(span["stop_ms"] - span["start_ms"] for span in spans)
