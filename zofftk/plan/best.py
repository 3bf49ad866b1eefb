"""Which setting trains quickest: the policy first, then buckets, recomputation and micro-batch, each with the best so
far. A change is kept only if its dry run is quicker, by sequence, and fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from zofftk.plan.answer import Compared
from zofftk.plan.setting import Setting
from zofftk.plan.trials import Trials

MIB = 1 << 20
BUCKETS = (4 * MIB, 64 * MIB)  # tried beside the engine's own choice
WORTH = 0.005  # of the time: less is no reason to change anything


class Comparison:
    """What has been tried, and the best of it so far."""

    def __init__(self, trials: Trials, start: Setting) -> None:
        self._trials = trials
        self.compared: list[Compared] = []
        self.reasons: list[str] = []
        self.best = self._try(start)

    def _try(self, setting: Setting) -> Compared:
        known = next((each for each in self.compared if each.setting == setting), None)
        if known is None:
            step_ms = self._trials.step(setting).step_ms
            known = Compared(setting, step_ms, self._trials.memory(setting).fits)
            self.compared.append(known)
        return known

    def choose(self, settings: Iterable[Setting], what: str) -> None:
        """Go on with the quickest of these, if it is quicker than the best so far."""
        tried = [each for setting in settings if (each := self._try(setting)).fits]
        quickest = min(tried, key=lambda each: each.ms_per_sequence, default=self.best)
        gain = 1 - quickest.ms_per_sequence / self.best.ms_per_sequence
        if gain > WORTH:
            self.reasons.append(f"{what.format(quickest.setting)}: {gain:.0%} less time a sequence")
            self.best = quickest

    def end(self) -> None:
        """What is quickest of all, also by less than is worth a reason of its own."""
        fitting = [each for each in self.compared if each.fits]
        self.best = min(fitting, key=lambda each: each.ms_per_sequence, default=self.best)


def compare(trials: Trials, start: Setting, largest_micro_batch: int | None) -> Comparison:
    """`start` fits."""
    found = Comparison(trials, start)
    found.choose([replace(start, policy=policy) for policy in start.policies], "policy {0.policy!r}")
    best = found.best.setting
    found.choose([replace(best, bucket_bytes=nbytes) for nbytes in BUCKETS], "buckets of {0.bucket_bytes} bytes")
    if trials.source.can_recompute:
        other = replace(found.best.setting, recompute=not start.recompute)
        text = "layers run again in backward" if other.recompute else "activations kept, no layer run again"
        if trials.memory(other).fits:
            found.choose([other], text)
    best = found.best.setting
    if largest_micro_batch and largest_micro_batch > start.micro_batch and best.recompute == start.recompute:
        found.choose([replace(best, micro_batch=largest_micro_batch)], "micro-batch {0.micro_batch}")
    found.end()
    return found
