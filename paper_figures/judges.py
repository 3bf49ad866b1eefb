"""What the records say of each claim: a verdict by a rule that can be read here, and the number it rests on."""

from __future__ import annotations

import math

import pandas as pd

from paper_figures.evidence import (
    CLOSE,
    FACTOR,
    HOLDS,
    IN_PART,
    NOT_REPRODUCED,
    UNTESTABLE,
    Evidence,
    Judgement,
    by_all,
    by_gain,
)
from paper_figures.frames import Column, Frame, our_frame

ZERO_OFFLOAD, WITH_MP = "ZeRO-Offload", "ZeRO-Offload with MP"
SEED_SDS = 2.0  # within so many standard deviations over seeds, two losses are the same
OWN, OWN_DELAYED, WHERE = "offload", "offload, delayed, {}", ("inside backward", "at step")  # in throughput_small
SMALL_BATCHES = ("1", "2", "4", "6", "8")


def unique_optimum(evidence: Evidence) -> Judgement:
    results = evidence.results("table1")
    best, reduction = results["best"], evidence.values("table1", "g16+update")["reduction"]
    link = best[0]["link_bytes_per_param"]
    checks = [len(best) == 1, results["rivals"] == 0, link == 4, reduction == 8]
    says = f"{link:g}M bytes, {reduction:g}x, {len(best)} of {results['number_of_placements']:,} placements"
    return by_all(checks, says)


def one_gpu_size(evidence: Evidence) -> Judgement:
    ours, torchs = (evidence.values("fig7", system)["1"] for system in (ZERO_OFFLOAD, "PyTorch"))
    return by_all([ours >= 13, ours / torchs >= 9], f"{ours:g} B, {ours / torchs:.1f}x")


def node_size(evidence: Evidence) -> Judgement:
    ours = evidence.values("fig7", ZERO_OFFLOAD)["16"]
    claimed = {"PyTorch": 50, "Megatron": 4.5, "ZeRO-2": 7.8, "L2L": 4.2}
    ratios = {system: ours / evidence.values("fig7", system)["16"] for system in claimed}
    says = ", ".join(f"{ratio:.2g}x {system}" for system, ratio in ratios.items())
    return by_all([ours >= 70, *(ratios[system] >= claimed[system] for system in claimed)], f"{ours:g} B; {says}")


def traffic(evidence: Evidence) -> Judgement:
    results = evidence.results("table1")
    l2l, ours = (results[name]["link_bytes_per_param"] for name in ("layer_to_layer", "zero_offload"))
    return by_all([l2l / ours >= 7], f"{l2l:g}M against {ours:g}M: {l2l / ours:g}x")


def headline(evidence: Evidence) -> Judgement:
    ours = evidence.values("fig8", ZERO_OFFLOAD)["10B"]
    torchs = evidence.values("fig8", "PyTorch").dropna()
    about_30 = CLOSE * 30 <= torchs.max() <= 30 / CLOSE
    return by_all([ours >= 40, about_30], f"{ours:.1f} at 10 B, PyTorch {torchs.max():.1f} at most")


def _mean_and_most(evidence: Evidence, other: str, mean: float, most: float) -> Judgement:
    gains = evidence.gains("fig8", ZERO_OFFLOAD, other)
    verdicts = {by_gain(gains.mean(), mean, "").verdict, by_gain(gains.max(), most, "").verdict}
    verdict = verdicts.pop() if len(verdicts) == 1 else IN_PART
    return Judgement(verdict, f"{gains.mean():+.0%} on average, {gains.max():+.0%} at most")


def against_l2l(evidence: Evidence) -> Judgement:
    return _mean_and_most(evidence, "L2L", 0.14, 0.22)


def against_swap_advisor(evidence: Evidence) -> Judgement:
    return _mean_and_most(evidence, "SwapAdvisor", 0.23, 0.37)


def on_a_node(evidence: Evidence) -> Judgement:
    claimed = {"PyTorch": 0.33, "ZeRO-2": 0.11, "Megatron": 0.64}
    with_mp = evidence.values("fig10", WITH_MP)
    ours = evidence.values("fig10", ZERO_OFFLOAD).dropna().combine_first(with_mp)
    most = {system: (ours / evidence.values("fig10", system) - 1).dropna().max() for system in claimed}
    says = ", ".join(f"{1 + gain:.2f}x {system}" for system, gain in most.items())
    verdicts = [by_gain(most[system], claimed[system], "").verdict for system in claimed]
    if all(verdict == HOLDS for verdict in verdicts):
        return Judgement(HOLDS, says)
    return Judgement(NOT_REPRODUCED if set(verdicts) == {NOT_REPRODUCED} else IN_PART, says)


def scaling(evidence: Evidence) -> Judgement:
    ours = evidence.values("fig11", ZERO_OFFLOAD)
    least, efficiency = ours.min(), ours["128"] / ours["1"]
    says = f"{least:.1f} at least; at 128 GPUs {efficiency:.0%} of one GPU's"
    return by_all([least >= 30, efficiency >= 0.9], says)


def crossover(evidence: Evidence) -> Judgement:
    ours, zero2 = (evidence.values("fig11", system) for system in (ZERO_OFFLOAD, "ZeRO-2"))
    out = evidence.oom("fig11", "ZeRO-2")
    checks = [set(out) == {"1", "2", "4", "8", "16"}]
    checks += [bool(ours["32"] > zero2.get("32", math.nan))]
    checks += [bool(zero2.get(gpus, math.nan) > ours[gpus]) for gpus in ("64", "128")]
    says = "; ".join(
        f"{gpus}: {ours[gpus]:.1f} against {zero2.get(gpus, math.nan):.1f}" for gpus in ("32", "64", "128")
    )
    return by_all(checks, f"OOM up to {max(map(int, out), default=0)}; {says}")


def cpu_adam(evidence: Evidence) -> Judgement:
    ns: Column = pd.DataFrame(evidence.results("table4")["sides"]).set_index("side")["ns_per_param"]
    loop, fused = ns["torch loop"] / ns["zofftk"], ns["torch fused + 2 casts"] / ns["zofftk"]
    verdict = HOLDS if loop >= 5 else IN_PART if loop > 1 else NOT_REPRODUCED
    return Judgement(verdict, f"{loop:.1f}x torch's plain loop, {fused:.1f}x its fused one with the casts it needs")


def delayed_speed(evidence: Evidence) -> Judgement:
    """By our engine on the emulated device, beside the simulation of the paper's release."""
    released = evidence.gains("fig9", "with DPU", "without DPU")
    rows = our_frame(evidence.records["throughput_small"])
    rows = rows[(rows["figure"] == "fig9") & (rows["kind"] == "measured")]
    by_system = rows.pivot_table(index="x", columns="system", values="value", aggfunc="first").astype(float)
    inside, at_step = (by_system[OWN_DELAYED.format(where)] / by_system[OWN] - 1 for where in WHERE)
    says = f"{_range(inside)} exchanged inside backward, {_range(at_step)} at the step, ours, measured in small; "
    says += f"the release, simulated, {_range(released)}"
    return by_all([inside.min() >= CLOSE * 0.12, inside.max() >= CLOSE * 0.59], says)


def _range(gains: Column) -> str:
    return f"{1 + gains.min():.2f}x to {1 + gains.max():.2f}x"


def _same(evidence: Evidence, item: str, measure: str) -> Judgement:
    """Of the runs with most seeds: the delay after a warm-up, as in the paper."""
    found: Frame = pd.DataFrame(evidence.results(item)["differences"])
    found = found[(found["measure"] == measure) & found["update"].str.startswith("delayed after")]
    found = found[found["in_seed_sds"].notna()] if len(found) else found
    if not len(found):
        return Judgement(UNTESTABLE, "fewer than two seeds")
    one = found.loc[found["seeds"].idxmax()]
    says = f"{one['mean']:+.4f}, {one['in_seed_sds']:+.1f} seed standard deviations ({one['seeds']:g} seeds)"
    return Judgement(HOLDS if abs(one["in_seed_sds"]) <= SEED_SDS else NOT_REPRODUCED, says)


def delayed_loss(evidence: Evidence) -> Judgement:
    """In part: not in the run that is drawn, but at some learning rates."""
    drawn = _same(evidence, "fig12", "held-out loss")
    found: Frame = pd.DataFrame(evidence.results("delay_rates")["differences"])
    found = found[(found["optimizer"] == "AdamW") & found["update"].str.startswith("delayed after")]
    same = found[(found["in_seed_sds"] <= SEED_SDS) | (found["mean"] <= 0)]["lr"]
    at = f" ({', '.join(f'{lr:g}' for lr in same)})" if len(same) else ""
    says = f"{drawn.number}; not higher at {len(same)} of {len(found)} learning rates of AdamW{at}"
    verdict = drawn.verdict if drawn.verdict != NOT_REPRODUCED or not len(same) else IN_PART
    return Judgement(verdict, says)


def delayed_f1(evidence: Evidence) -> Judgement:
    of_f1, of_loss = (_same(evidence, "fig13", measure) for measure in ("macro F1", "test loss"))
    return Judgement(of_f1.verdict, f"F1 {of_f1.number}; loss on test texts {of_loss.number}")


def exact(evidence: Evidence) -> Judgement:
    pairs = evidence.results("fig12")["equal"]
    if not pairs:
        return Judgement(UNTESTABLE, "no pair of runs, plain and offloaded")
    same = [pair["first_difference"] is None for pair in pairs]
    steps = sum(pair["steps"] for pair in pairs)
    return by_all(same, f"{sum(same)} of {len(same)} pairs of runs equal in all of {steps:,} steps")


def breakdown(evidence: Evidence) -> Judgement:
    """What one step brings over another is a size, not a least gain: twice as much is as far off as half of it."""
    torchs = evidence.values("fig14", "PyTorch")
    pt_cpu, ours, late = (
        evidence.values("fig14", f"Offload + {rest}") for rest in ("PT-CPU Adam", "CPU-Adam", "CPU-Adam + DPU")
    )
    small = [batch for batch in SMALL_BATCHES if batch in torchs.dropna().index]
    found = {
        "PyTorch over PT-CPU": ((torchs[small] / pt_cpu[small] - 1).mean(), 0.16),
        "CPU-Adam adds up to": ((ours / pt_cpu - 1).max(), 0.10),
        "the delay adds": ((late[small] / ours[small] - 1).mean(), 0.07),
        "large batches": (late.max() / torchs.max() - 1, 0.39),
    }
    says = ", ".join(f"{name} {gain:+.0%}" for name, (gain, _) in found.items())
    return by_all([claimed / FACTOR <= gain <= claimed * FACTOR for gain, claimed in found.values()], says)
