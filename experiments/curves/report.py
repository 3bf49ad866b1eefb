"""What the records of training runs say, as Markdown: tables, and in words what holds of the paper's claims."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.curves.analysis import (
    SeedDifference,
    final_loss,
    first_difference,
    held_out_slope,
    lag,
    mean_and_sd,
    seed_difference,
    slope_of_last_tenth,
)

Record = Mapping[str, Any]
BySeed = dict[int, Record]
SYNCHRONOUS, PLAIN, TORCH = "synchronous", "plain", "torch"
HOLDS_WITHIN = 2.0  # seed standard deviations
SMOOTHED_SHARE = 0.02  # of the steps, for the gap on the way


def update_of(record: Record) -> str:
    """Who updates, in words."""
    config = record["config"]
    if config["delay_after"] is None:
        return config["update"]
    return f"delayed after {config['delay_after']}" if config["delay_after"] else "delayed from the first step"


def by_update(records: Sequence[Record]) -> dict[str, BySeed]:
    """By kind of update, by seed, in the order in which they come."""
    groups: dict[str, BySeed] = {}
    for record in records:
        groups.setdefault(update_of(record), {})[record["config"]["seed"]] = record
    return groups


def by_config(records: Sequence[Record], *names: str) -> dict[tuple[Any, ...], list[Record]]:
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record["config"][name] for name in names), []).append(record)
    return groups


def losses(record: Record) -> list[float]:
    return record["samples"]["losses"]


def training_loss(record: Record) -> float:
    return final_loss(losses(record))


def result(name: str) -> Callable[[Record], float]:
    return lambda record: record["results"][name]


held_out_loss = result("held_out_loss")


def flatness(record: Record) -> float:
    return held_out_slope(record["samples"]["evaluations"])


def each(group: BySeed, measure: Callable[[Record], float]) -> dict[int, float]:
    return {seed: measure(record) for seed, record in group.items()}


def show(value: float, digits: int = 4, *, sign: bool = False) -> str:
    return "-" if math.isnan(value) else f"{value:{'+' if sign else ''}.{digits}f}"


def with_sd(group: BySeed, measure: Callable[[Record], float]) -> str:
    mean, sd = mean_and_sd(list(each(group, measure).values()))
    return f"{show(mean)} ± {show(sd)}"


def against(groups: Mapping[str, BySeed], label: str, measure: Callable[[Record], float]) -> SeedDifference | None:
    """A kind of update against the synchronous one, where there is a seed that both have."""
    reference, other = groups.get(SYNCHRONOUS, {}), groups[label]
    if label == SYNCHRONOUS or not reference.keys() & other.keys():
        return None
    return seed_difference(each(reference, measure), each(other, measure))


def difference_cells(difference: SeedDifference | None) -> list[str]:
    if difference is None:
        return ["", ""]
    spread = f" ± {show(difference.sd_of_differences)}" if difference.seeds > 1 else ""
    return [f"{show(difference.mean, sign=True)}{spread}", show(difference.in_seed_sds, 1, sign=True)]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [list(head), ["---"] * len(head), *map(list, rows)]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def in_words(difference: SeedDifference, *, better: int = -1) -> str:
    """`better`: the sign of a difference that is an improvement."""
    sds = difference.in_seed_sds
    if not math.isfinite(difference.mean):
        return "cannot be said: a loss is not finite"
    if math.isnan(sds):
        return f"cannot be said from {difference.seeds} seed: {show(difference.mean, sign=True)}"
    in_sds = f"{show(sds, 1, sign=True)} seed standard deviations ({difference.seeds} seeds)"
    how = f"{show(difference.mean, sign=True)}, {in_sds}"
    if abs(sds) <= HOLDS_WITHIN:
        return f"holds: {how}"
    return f"does not hold, {'better' if sds * better > 0 else 'worse'}: {how}"


# -- pre-training ------------------------------------------------------------------------------------------------


def report_pretraining(records: Sequence[Record]) -> list[str]:
    lines = []
    for (model,), of_model in by_config(records, "model").items():
        groups, config = by_update(of_model), of_model[0]["config"]
        lines += ["", f"GPT-2-like, {model} parameters, {config['steps']} steps, AdamW at lr {config['lr']:g}:", ""]
        lines += pretraining_table(groups)
        lines += ["", *equal_lines(groups), *rounding_line(groups)]
        for label in groups:
            if label.startswith("delayed"):
                lines += [*same_loss_line(groups, label), *lag_line(groups, label)]
    return lines


def pretraining_table(groups: Mapping[str, BySeed]) -> list[str]:
    head = ["update", "seeds", "training loss, last tenth", "slope there, nats/1000 steps", "of held-out loss"]
    head.append("held-out loss")
    rows = []
    for label, group in groups.items():
        slopes = [slope_of_last_tenth(losses(record)) for record in group.values()]
        slope = sum(one.per_1000_steps for one in slopes) / len(slopes)
        error = math.sqrt(sum(one.standard_error**2 for one in slopes)) / len(slopes)
        of_held_out, _ = mean_and_sd(list(each(group, flatness).values()))
        cells = [with_sd(group, training_loss), f"{show(slope, sign=True)} ± {show(error)}"]
        cells += [show(of_held_out, sign=True)]
        cells += [with_sd(group, held_out_loss), *difference_cells(against(groups, label, held_out_loss))]
        rows.append([label, str(len(group)), *cells])
    return table([*head, "difference", "in seed SDs"], rows)


def equal_lines(groups: Mapping[str, BySeed]) -> list[str]:
    """Whether the run without the engine and the synchronous one have the same losses, step by step."""
    plain, offloaded = groups.get(PLAIN, {}), groups.get(SYNCHRONOUS, {})
    lines = []
    for seed in sorted(plain.keys() & offloaded.keys()):
        step = first_difference(losses(plain[seed]), losses(offloaded[seed]))
        count = len(losses(plain[seed]))
        says = (
            f"equal bit for bit in all {count} steps" if step is None else f"different from step {step} of {count} on"
        )
        lines.append(f"Plain and synchronous losses, seed {seed}: {says}.")
    return lines


def rounding_line(groups: Mapping[str, BySeed]) -> list[str]:
    """What torch's own AdamW changes, which differs by rounding: a yardstick for all other differences."""
    difference = against(groups, TORCH, held_out_loss) if TORCH in groups else None
    if difference is None:
        return []
    return [f"torch's AdamW, which rounds otherwise, moves the held-out loss by {show(difference.mean, sign=True)}."]


def same_loss_line(groups: Mapping[str, BySeed], label: str) -> list[str]:
    difference = against(groups, label, held_out_loss)
    return [f"The same final loss when {label}: {in_words(difference)}."] if difference else []


def lag_line(groups: Mapping[str, BySeed], label: str) -> list[str]:
    """The paper's delayed curve is behind in an early part of the run alone."""
    both = sorted(groups.get(SYNCHRONOUS, {}).keys() & groups[label].keys())
    if not both:
        return []
    curves = [[losses(groups[name][seed]) for seed in both] for name in (SYNCHRONOUS, label)]
    if not all(math.isfinite(loss) for of_update in curves for curve in of_update for loss in curve):
        return [f"No gap on the way when {label}: a loss is not finite."]
    steps = len(curves[0][0])
    _, seed_sd = mean_and_sd(list(each(groups[SYNCHRONOUS], training_loss).values()))
    tolerance = 0.0 if math.isnan(seed_sd) else seed_sd
    found = lag(*curves, window=max(1, round(SMOOTHED_SHARE * steps)), tolerance=tolerance)
    where = f"{show(found.largest_gap, sign=True)} near step {found.at_step} of {steps}"
    gap = f"Largest gap on the way when {label}: {where}"
    by = f"by more than {show(tolerance)}"
    return [
        f"{gap}; behind {by} up to step {found.last_step_behind}." if found.last_step_behind else f"{gap}; not {by}."
    ]


# -- the sweep ---------------------------------------------------------------------------------------------------


def report_sweep(records: Sequence[Record]) -> list[str]:
    """Held-out losses by optimizer and learning rate, and each kind of update at its own best rate."""
    lines = []
    for (model, optimizer), alike in by_config(records, "model", "optimizer").items():
        rates = {lr: by_update(of_rate) for (lr,), of_rate in sorted(by_config(alike, "lr").items())}
        labels = list(by_update(alike))
        late = [label for label in labels if label != SYNCHRONOUS]
        head = ["lr", *(f"held-out loss, {label}" for label in labels)]
        head += [cell for label in late for cell in (f"difference, {label}", "in seed SDs")]
        rows = []
        for lr, groups in rates.items():
            cells = [with_sd(groups[label], held_out_loss) if label in groups else "" for label in labels]
            for label in late:
                cells += difference_cells(against(groups, label, held_out_loss) if label in groups else None)
            rows.append([f"{lr:g}", *cells])
        config = alike[0]["config"]
        lines += [
            "",
            f"{optimizer}, GPT-2-like, {model} parameters, {config['steps']} steps:",
            "",
            *table(head, rows),
            "",
        ]
        slopes = [slope for record in alike if math.isfinite(slope := flatness(record))]
        if slopes:
            between = f"{show(min(slopes), 2, sign=True)} to {show(max(slopes), 2, sign=True)}"
            lines.append(f"Slope of the held-out loss over the last tenth: {between} nats/1000 steps.")
        for label in late:
            lines += [line for lr, groups in rates.items() for line in rate_line(groups, label, optimizer, lr)]
            lines += best_line(rates, label, optimizer)
    return lines


def rate_line(groups: Mapping[str, BySeed], label: str, optimizer: str, lr: float) -> list[str]:
    difference = against(groups, label, held_out_loss) if label in groups else None
    return (
        [f"{optimizer} at lr {lr:g}, the same final loss when {label}: {in_words(difference)}."] if difference else []
    )


def best_line(rates: Mapping[float, Mapping[str, BySeed]], label: str, optimizer: str) -> list[str]:
    """What the delay costs whoever tunes the learning rate with it."""
    best: dict[str, tuple[float, float]] = {}
    for name in (SYNCHRONOUS, label):
        means = [
            (mean_and_sd(list(each(groups[name], held_out_loss).values()))[0], lr)
            for lr, groups in rates.items()
            if name in groups
        ]
        finite = [pair for pair in means if math.isfinite(pair[0])]
        if not finite:
            return []
        best[name] = min(finite)
    (loss, lr), (other, other_lr) = best[SYNCHRONOUS], best[label]
    both = f"{show(loss)} at {lr:g} synchronous, {show(other)} at {other_lr:g} {label}"
    return [f"{optimizer}, each at its best rate: {both}: {show(other - loss, sign=True)}."]


# -- fine-tuning -------------------------------------------------------------------------------------------------

METRICS = {"accuracy": "test accuracy", "macro_f1": "macro F1", "held_out_loss": "test loss"}


def report_finetuning(records: Sequence[Record]) -> list[str]:
    groups, config, data = by_update(records), records[0]["config"], records[0]["data"]
    texts, topics = data["texts"], len(data["topics"])
    lines = [
        "",
        f"{data['model']} on {texts['training']} texts of {topics} topics for {config['steps']} steps, "
        f"tested on {texts['test']}; always the commonest topic: {show(data['commonest_topic_share'])}:",
        "",
    ]
    head = ["update", "seeds", "training loss, last tenth", *METRICS.values()]
    head += [cell for name in METRICS.values() for cell in (f"difference, {name}", "in seed SDs")]
    rows = []
    for label, group in groups.items():
        cells = [with_sd(group, training_loss), *(with_sd(group, result(name)) for name in METRICS)]
        cells += [cell for name in METRICS for cell in difference_cells(against(groups, label, result(name)))]
        rows.append([label, str(len(group)), *cells])
    lines += [*table(head, rows), ""]
    for label in groups:
        if (difference := against(groups, label, result("macro_f1"))) is not None:
            lines.append(f"The same F1 when {label}: {in_words(difference, better=1)}.")
    return lines
