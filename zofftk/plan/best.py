"""Which setting trains quickest: the policy first, then buckets, recomputation and micro-batch, each with the best so
far. A change is kept only if its dry run is quicker, by sequence, and it should fit; that the best fits is tried.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from zofftk.plan.answer import Compared
from zofftk.plan.memory import LINK, SLOTS
from zofftk.plan.setting import POLICIES, Setting
from zofftk.plan.trials import Trials

MIB = 1 << 20
BUCKETS = (32 * MIB, 128 * MIB)  # tried beside the engine's own choice
SUPERSEDED = "delayed"  # with the model handed over it is never slower
LIKELY = "delayed, behind forward"  # most often the quickest


@dataclass
class Found:
    """What has been tried, the best of it so far, and what has led there."""

    compared: list[Compared]
    reasons: list[str]
    best: Compared


class Comparison:
    """Goes on with what was found so far. `start` fits."""

    def __init__(self, trials: Trials, start: Setting, found: Found | None = None) -> None:
        self._trials, self._start = trials, start
        self.compared = found.compared if found else []
        self.reasons = found.reasons if found else []
        self.best = found.best if found else self._try(start)

    @property
    def found(self) -> Found:
        return Found(self.compared, self.reasons, self.best)

    def _try(self, setting: Setting) -> Compared:
        known = next((each for each in self.compared if each.setting == setting), None)
        if known is None:
            known = Compared(setting, self._trials.step(setting).step_ms, self._should_fit(setting))
            self.compared.append(known)
        return known

    def _should_fit(self, setting: Setting) -> bool:
        """From the same layers and batch under the policy and buckets of the start."""
        start = self._start
        known = self._trials.memory(replace(start, micro_batch=setting.micro_batch, recompute=setting.recompute))
        becomes_late = "update" in POLICIES[setting.policy] and "update" not in POLICIES[start.policy]
        on_host = known.host.items[LINK] if becomes_late else 0
        on_device = 0
        if setting.bucket_bytes is not None:
            slots = known.device.items[SLOTS]
            on_device = max(0, 4 * setting.bucket_bytes - slots)  # three slots, and what waits for the first to fill
        in_host = known.devices_in_host * on_device
        return known.host_free_bytes >= on_host + in_host and known.device.free_bytes >= on_device

    def choose(self, settings: Iterable[Setting], what: str) -> None:
        """Go on with the quickest of these, if it is quicker than the best so far."""
        tried = [each for setting in settings if (each := self._try(setting)).fits]
        quickest = min(tried, key=lambda each: each.ms_per_sequence, default=self.best)
        gain = 1 - quickest.ms_per_sequence / self.best.ms_per_sequence
        if gain > 0:
            self.reasons.append(f"{what.format(quickest.setting)}: {gain:.1%} less time a sequence")
            self.best = quickest

    def end(self) -> None:
        """The quickest of all that fits, which is now tried."""
        for number, each in sorted(enumerate(self.compared), key=lambda pair: pair[1].ms_per_sequence):
            fits = self._trials.memory(each.setting).fits
            self.compared[number] = replace(each, fits=fits)
            if fits:
                if each.setting != self.best.setting:
                    self.reasons = ["the quickest of all that were tried and fit"]
                self.best = self.compared[number]
                return


def with_policies(start: Setting) -> list[Setting]:
    return [replace(start, policy=policy) for policy in start.policies if policy != SUPERSEDED]


def with_buckets(setting: Setting) -> list[Setting]:
    return [replace(setting, bucket_bytes=nbytes) for nbytes in BUCKETS]


def compare(trials: Trials, start: Setting) -> Found:
    """Policies, buckets and recomputation, with the micro-batch of `start`, which fits."""
    comparison = Comparison(trials, start)
    comparison.choose(with_policies(start), "the update {0.policy}")
    comparison.choose(with_buckets(comparison.best.setting), "buckets of {0.bucket_mib:.0f} MiB")
    same = replace(start, recompute=not start.recompute)
    if trials.source.can_recompute and trials.memory(same).fits:
        text = "layers run again in backward" if same.recompute else "activations kept, no layer run again"
        comparison.choose([replace(comparison.best.setting, recompute=same.recompute)], text)
    return comparison.found


def complete(trials: Trials, start: Setting, found: Found, largest_micro_batch: int | None) -> Found:
    """With the largest micro-batch that fits, if it is known, too; the best is tried for its memory."""
    comparison = Comparison(trials, start, found)
    best = found.best.setting
    if largest_micro_batch and largest_micro_batch > start.micro_batch and best.recompute == start.recompute:
        # Larger buckets can take the room of the last sequence.
        larger = replace(best, micro_batch=largest_micro_batch)
        either = dict.fromkeys((larger, replace(larger, bucket_bytes=start.bucket_bytes)))
        comparison.choose(either, "a micro-batch of {0.micro_batch}")
    comparison.end()
    return comparison.found
