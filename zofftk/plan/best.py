"""Which setting trains quickest: the policy first, then buckets, recomputation and micro-batch, each with the best so
far. A change is kept only if its dry run is quicker, by sequence, and it should fit; that the best fits is tried.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from zofftk.plan.answer import Compared
from zofftk.plan.memory import LINK, SLOTS
from zofftk.plan.setting import POLICIES, Setting
from zofftk.plan.trials import Trials

MIB = 1 << 20
BUCKETS = (32 * MIB, 128 * MIB)  # tried beside the engine's own choice
WORTH = 0.005  # of the time: less is no reason to change anything
SUPERSEDED = "delayed"  # with the model handed over it is never slower


class Comparison:
    """What has been tried, and the best of it so far. `start` fits."""

    def __init__(self, trials: Trials, start: Setting) -> None:
        self._trials, self._start = trials, start
        self.compared: list[Compared] = []
        self.reasons: list[str] = []
        self.best = self._try(start)

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
        return known.host.free_bytes >= on_host and known.device.free_bytes >= on_device

    def choose(self, settings: Iterable[Setting], what: str) -> None:
        """Go on with the quickest of these, if it is quicker than the best so far."""
        tried = [each for setting in settings if (each := self._try(setting)).fits]
        quickest = min(tried, key=lambda each: each.ms_per_sequence, default=self.best)
        gain = 1 - quickest.ms_per_sequence / self.best.ms_per_sequence
        if gain > WORTH:
            self.reasons.append(f"{what.format(quickest.setting)}: {gain:.0%} less time a sequence")
            self.best = quickest

    def end(self) -> None:
        """The quickest of all that fits, which is now tried."""
        for number, each in sorted(enumerate(self.compared), key=lambda pair: pair[1].ms_per_sequence):
            fits = self._trials.memory(each.setting).fits
            self.compared[number] = replace(each, fits=fits)
            if fits:
                if each.setting != self.best.setting:
                    self.reasons = [f"of all that were tried the quickest that fits: {each.setting.policy!r}"]
                self.best = self.compared[number]
                return


def compare(trials: Trials, start: Setting, largest_micro_batch: int | None) -> Comparison:
    """`start` fits."""
    found = Comparison(trials, start)
    policies = [policy for policy in start.policies if policy != SUPERSEDED]
    found.choose([replace(start, policy=policy) for policy in policies], "the update {0.policy}")
    best = found.best.setting
    found.choose([replace(best, bucket_bytes=nbytes) for nbytes in BUCKETS], "buckets of {0.bucket_mib:.0f} MiB")
    if trials.source.can_recompute:
        other = replace(found.best.setting, recompute=not start.recompute)
        text = "layers run again in backward" if other.recompute else "activations kept, no layer run again"
        same = replace(start, recompute=other.recompute)
        if not trials.surely_too_large(same) and trials.memory(same).fits:
            found.choose([other], text)
    best = found.best.setting
    if largest_micro_batch and largest_micro_batch > start.micro_batch and best.recompute == start.recompute:
        found.choose([replace(best, micro_batch=largest_micro_batch)], "a micro-batch of {0.micro_batch}")
    found.end()
    return found
