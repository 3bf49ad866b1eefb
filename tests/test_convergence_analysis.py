"""What is read from loss curves, on made-up curves whose answers are known."""

import math

import numpy as np
import pytest

from experiments.curves import report
from experiments.curves.analysis import (
    final_loss,
    first_difference,
    held_out_slope,
    lag,
    mean_and_sd,
    seed_difference,
    slope_of_last_tenth,
    smoothed,
)


def test_the_final_loss_is_the_mean_of_the_last_tenth():
    assert final_loss([9.0] * 90 + [1.0, 3.0] * 5) == 2.0
    assert final_loss([9.0] * 5 + [1.0, 2.0, 6.0]) == 3.0  # never fewer than three steps


def test_a_line_has_its_slope_and_no_error():
    slope = slope_of_last_tenth([5 - 0.002 * step for step in range(400)])
    assert slope.per_1000_steps == pytest.approx(-2)
    assert slope.standard_error == pytest.approx(0, abs=1e-9)


def test_the_slope_is_that_of_the_last_tenth_alone():
    steep_then_flat = [10 - 0.01 * step for step in range(900)] + [1.0] * 100
    assert slope_of_last_tenth(steep_then_flat).per_1000_steps == pytest.approx(0, abs=1e-9)


def test_the_slopes_error_is_the_textbooks():
    losses = np.array([1.0, 2.0, 2.0, 3.0])
    # By hand: slope 0.6, residuals -0.1, 0.3, -0.3, 0.1, so sqrt(0.2 / 2 / 5).
    slope = slope_of_last_tenth([0.0] * 36 + losses.tolist())
    assert slope.per_1000_steps == pytest.approx(600)
    assert slope.standard_error == pytest.approx(1000 * math.sqrt(0.02))


def test_the_held_out_slope_is_of_evaluations_in_the_last_tenth():
    evaluations = [
        {"step": step, "held_out_loss": 9.0 if step < 900 else 3 - step / 500} for step in range(50, 1001, 50)
    ]
    assert held_out_slope(evaluations) == pytest.approx(-2)
    assert math.isnan(held_out_slope(evaluations[:1]))
    assert held_out_slope([{"step": 90, "held_out_loss": 2.0}, {"step": 100, "held_out_loss": 1.9}]) == pytest.approx(
        -10
    )


def test_noise_stays_within_its_error():
    generator = np.random.default_rng(0)
    off = []
    for _ in range(200):
        slope = slope_of_last_tenth(3 - 0.001 * np.arange(1000) + generator.normal(0, 0.1, 1000))
        off.append((slope.per_1000_steps + 1) / slope.standard_error)
    assert np.std(off) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize(
    ("one", "other", "step"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([1.0, 2.0, 3.0], [1.0, 2.5, 3.0], 2),
        ([1.0, 2.0], [1.0, 2.0, 3.0], 3),
        ([1.0, math.nan], [1.0, math.nan], None),
        ([1.0, math.nan], [1.0, 2.0], 2),
    ],
)
def test_the_first_difference_of_two_curves(one, other, step):
    assert first_difference(one, other) == step
    assert first_difference(other, one) == step


def test_a_difference_is_taken_seed_by_seed_and_measured_by_the_references_spread():
    difference = seed_difference({0: 1.0, 1: 2.0, 2: 3.0}, {2: 3.6, 0: 1.4, 1: 2.5})
    assert difference.seeds == 3
    assert difference.mean == pytest.approx(0.5)
    assert difference.sd_of_differences == pytest.approx(0.1)
    assert difference.seed_sd == pytest.approx(1.0)
    assert difference.in_seed_sds == pytest.approx(0.5)


def test_seeds_that_only_one_has_are_left_out():
    difference = seed_difference({0: 1.0, 1: 3.0}, {1: 3.5, 7: 100.0})
    assert (difference.seeds, difference.mean) == (1, 0.5)
    assert math.isnan(difference.sd_of_differences)
    assert difference.in_seed_sds == pytest.approx(0.5 / math.sqrt(2))
    with pytest.raises(ValueError, match=r"expected a seed that both have, got \[0\] and \[1\]"):
        seed_difference({0: 1.0}, {1: 1.0})


def test_one_value_has_no_spread():
    mean, sd = mean_and_sd([2.0])
    assert mean == 2.0
    assert math.isnan(sd)


def test_smoothing_takes_whole_windows():
    assert smoothed([1.0, 2.0, 6.0, 4.0], 3) == pytest.approx([3.0, 4.0])
    with pytest.raises(ValueError, match="expected 1 to 2 steps, got 3"):
        smoothed([1.0, 2.0], 3)


def test_a_curve_that_is_behind_in_between():
    reference = [3 - step / 1000 for step in range(1000)]
    behind = [loss + (0.4 if 200 <= step < 500 else 0.0) for step, loss in enumerate(reference)]
    found = lag([reference], [behind], window=1, tolerance=0.1)
    assert found.largest_gap == pytest.approx(0.4)
    assert found.last_step_behind == 500
    assert 200 < found.at_step <= 500
    wide = lag([reference, reference], [behind, behind], window=101, tolerance=0.39)
    assert wide.last_step_behind == pytest.approx(450, abs=2)  # the last window that lies inside as good as whole
    assert lag([reference], [reference], window=10, tolerance=0.0).last_step_behind is None


# -- the report ----------------------------------------------------------------------------------------------


def record(update, seed, losses, *, delay_after=None, lr=1e-3, **results):
    config = {"model": "1.3m", "optimizer": "AdamW", "update": update, "delay_after": delay_after, "lr": lr}
    config |= {"seed": seed, "steps": len(losses)}
    results.setdefault("held_out_loss", losses[-1])
    evaluations = [{"step": step, "held_out_loss": loss} for step, loss in enumerate(losses, start=1) if step % 5 == 0]
    return {"config": config, "samples": {"losses": losses, "evaluations": evaluations}, "results": results}


def curve(end, steps=50):
    return [end + 1.0] * (steps // 2) + [end] * (steps - steps // 2)


def test_the_report_says_what_holds_and_what_does_not():
    runs = [record("synchronous", seed, curve(2.0 + 0.1 * seed)) for seed in range(3)]
    runs += [record("delayed", seed, curve(2.05 + 0.1 * seed), delay_after=40) for seed in range(3)]
    runs += [record("delayed", seed, curve(3.0 + 0.1 * seed), delay_after=0) for seed in range(3)]
    lines = report.report_pretraining(runs)
    assert (
        "The same final loss when delayed after 40: holds: +0.0500, +0.5 seed standard deviations (3 seeds)." in lines
    )
    worse = "does not hold, worse: +1.0000, +10.0 seed standard deviations (3 seeds)."
    assert f"The same final loss when delayed from the first step: {worse}" in lines
    assert any("| synchronous | 3 | 2.1000 ± 0.1000 |" in line for line in lines)


@pytest.mark.parametrize(("changed", "says"), [(None, "equal bit for bit in all 50 steps"), (7, "step 8 of 50 on")])
def test_the_report_compares_plain_and_synchronous_step_by_step(changed, says):
    losses = curve(2.0)
    other = list(losses)
    if changed is not None:
        other[changed] = math.nextafter(other[changed], 9)
    lines = report.report_pretraining([record("plain", 0, losses), record("synchronous", 0, other)])
    (line,) = [line for line in lines if line.startswith("Plain and synchronous losses, seed 0")]
    assert says in line


def test_the_sweep_names_every_rate_and_each_ones_best():
    runs = [
        record(update, seed, curve(loss + 0.1 * seed), delay_after=delay_after, lr=lr)
        for seed in range(2)
        for update, delay_after, lr, loss in [
            ("synchronous", None, 1e-3, 2.0),
            ("synchronous", None, 1e-2, 1.5),
            ("delayed", 0, 1e-3, 2.0),
            ("delayed", 0, 1e-2, 4.0),
        ]
    ]
    lines = report.report_sweep(runs)
    assert any(line.startswith("AdamW at lr 0.001, ") and "holds: +0.0000" in line for line in lines)
    assert any(line.startswith("AdamW at lr 0.01, ") and "does not hold, worse: +2.5000" in line for line in lines)
    best = "1.5500 at 0.01 synchronous, 2.0500 at 0.001 delayed from the first step: +0.5000"
    assert f"AdamW, each at its best rate: {best}." in lines


def test_a_run_that_diverged_decides_nothing():
    runs = [record("synchronous", seed, curve(2.0 + seed)) for seed in range(2)]
    runs += [record("delayed", seed, [*curve(2.0, 49), math.nan], delay_after=40) for seed in range(2)]
    lines = report.report_pretraining(runs)
    assert "The same final loss when delayed after 40: cannot be said: a loss is not finite." in lines
    assert "No gap on the way when delayed after 40: a loss is not finite." in lines


def test_a_lower_metric_is_worse_where_higher_is_better():
    data = {"model": "m", "texts": {"training": 9, "test": 3}, "topics": ["a", "b"], "commonest_topic_share": 0.5}
    runs = [
        record(update, seed, curve(1.0), delay_after=delay_after, accuracy=0.5, macro_f1=f1 + 0.01 * seed)
        | {"data": data}
        for seed in range(3)
        for update, delay_after, f1 in (("synchronous", None, 0.7), ("delayed", 40, 0.6), ("delayed", 0, 0.8))
    ]
    lines = report.report_finetuning(runs)
    assert any(line.startswith("The same F1 when delayed after 40: does not hold, worse: -0.1") for line in lines)
    assert any(line.startswith("The same F1 when delayed from the first step: does not hold, better") for line in lines)
