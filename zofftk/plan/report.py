"""A plan as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from zofftk.plan.answer import Alternative, Plan
from zofftk.plan.memory import MemoryList
from zofftk.plan.search import MOST, most_layers
from zofftk.plan.setting import POLICIES, Setting
from zofftk.plan.step_parts import BACKWARD, FORWARD, StepParts

MIB, GIB = 1 << 20, 1 << 30
_BESIDE = {"pack", "copy back"}  # the device's own work, beside forward and backward


def print_plan(plan: Plan, console: Console) -> None:
    _say(console, f"{plan.model}: {_billions(plan.num_params)} parameters on {plan.machine}")
    _say(console, f"asked: {describe(plan.setting)}")
    _say(console, _verdict(plan))
    console.print(memory_table("one device", plan.memory.device))
    console.print(memory_table("one host, all its devices", plan.memory.host))
    if plan.memory.devices_in_host:
        both = _size(plan.memory.host_total_bytes)
        _say(console, f"device and host are the same memory: {both} of it together")
    if plan.step is not None:
        console.print(step_table(plan.step))
        console.print(stage_table(plan.step))
    if plan.nearest is not None:
        _say(console, f"nearest that fits: {describe_nearest(plan.nearest)}")
    elif not plan.fits:
        _say(console, "nothing that was tried fits: neither with more devices nor with a single layer")
    for line in _largest(plan):
        _say(console, line)
    if plan.best is not None:
        console.print(compared_table(plan))
        _say(console, f"best: {describe(plan.best.setting)}, {_best_time(plan)}")
        for reason in plan.best_reasons or ("nothing that was tried is quicker and fits",):
            _say(console, f"  {reason}")
        if "delayed" in plan.best.setting.policy:
            _say(console, "  a delayed update applies each gradient one step late, which changes the training a little")
    _say(console, f"not measured: {len(plan.assumed)}")
    for line in plan.assumed:
        _say(console, f"  {line}")
    _say(console, f"answered in {plan.seconds:.1f} s")


def describe(setting: Setting) -> str:
    """In words, without what is usual."""
    words = [f"micro-batch {setting.micro_batch}, sequence {setting.seq}", f"{setting.policy} update", setting.dtype]
    words.append("recomputation" if setting.recompute else "no recomputation")
    if setting.backwards > 1:
        words.append(f"{setting.backwards} micro-batches a step")
    if setting.ranks > 1:
        words.append(f"{setting.ranks} data-parallel ranks")
    if setting.tp > 1:
        words.append(f"tensor-parallel degree {setting.tp}")
    if setting.bucket_mib is not None:
        words.append(f"buckets of {setting.bucket_mib:.4g} MiB")
    return ", ".join(words)


def describe_nearest(nearest: Alternative) -> str:
    step = "" if nearest.step_ms is None else f"; {nearest.step_ms:,.1f} ms a step"
    size = f" ({_billions(nearest.num_params)} parameters)" if nearest.layers is not None else ""
    return f"{nearest.reason}{size}{step} [{describe(nearest.setting)}]"


def _verdict(plan: Plan) -> str:
    if plan.fits:
        if plan.memory.devices_in_host:
            return f"yes, it fits: {_size(plan.memory.host_free_bytes)} left, the device being the host itself"
        device, host = plan.memory.device, plan.memory.host
        return f"yes, it fits: {_size(device.free_bytes)} left on the device, {_size(host.free_bytes)} on the host"
    left = (("device", plan.memory.device.free_bytes), ("host", plan.memory.host_free_bytes))
    short = [f"{_size(-nbytes)} too little on the {place}" for place, nbytes in left if nbytes < 0]
    return f"no, it does not fit: {', '.join(short)}"


def memory_table(title: str, memory: MemoryList) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("what takes the memory")
    unit, name_of_unit = (GIB, "GiB") if memory.total_bytes >= GIB else (MIB, "MiB")
    table.add_column(name_of_unit, justify="right")
    for name, nbytes in memory.items.items():
        table.add_row(name, f"{nbytes / unit:,.2f}")
    table.add_section()
    table.add_row("in all", f"{memory.total_bytes / unit:,.2f}")
    table.add_row("there is", f"{memory.capacity_bytes / unit:,.2f}")
    if memory.locked_bytes:
        table.add_row("of it page-locked", f"{memory.locked_bytes / unit:,.2f}")
    return table


def step_table(step: StepParts) -> Table:
    title = f"a step: {step.step_ms:,.1f} ms, {step.tflops:.1f} TFLOPS a device"
    table = Table(title=title, title_justify="left")
    table.add_column("where the time goes")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    for name, ns in step.parts.items():
        is_work = name in (FORWARD, BACKWARD, *_BESIDE)
        table.add_row(name if is_work else f"standing still: {name}", f"{ns / 1e6:,.1f}", f"{ns / step.step_ns:.0%}")
    return table


def stage_table(step: StepParts) -> Table:
    table = Table(title="what forward and backward hide", title_justify="left")
    table.add_column("stage")
    for column in ("ms in all", "hidden", "exposed"):
        table.add_column(column, justify="right")
    for name, stage in step.stages.items():
        if name not in (FORWARD, BACKWARD):
            numbers = (stage.total_ns, stage.hidden_ns, stage.exposed_ns)
            table.add_row(name, *(f"{ns / 1e6:,.1f}" for ns in numbers))
    return table


def compared_table(plan: Plan) -> Table:
    table = Table(title="compared; times in ms", title_justify="left", padding=(0, 1, 0, 0))  # 80 columns wide
    table.add_column("update", min_width=max(map(len, POLICIES)))
    for column in ("bucket", "batch", "again", "a step", "a sequence", "fits"):
        table.add_column(column, justify="right")
    for each in plan.compared:
        setting = each.setting
        table.add_row(
            setting.policy,
            "own" if setting.bucket_mib is None else f"{setting.bucket_mib:.4g} MiB",
            str(setting.micro_batch),
            "yes" if setting.recompute else "no",
            f"{each.step_ms:,.1f}",
            f"{each.ms_per_sequence:,.2f}",
            "yes" if each.fits else "no",
        )
    return table


def _largest(plan: Plan) -> list[str]:
    lines = []
    if plan.largest_micro_batch is not None:
        at_least = "at least " if plan.largest_micro_batch >= MOST else ""
        lines.append(f"largest micro-batch that fits: {at_least}{plan.largest_micro_batch}")
    if plan.largest_layers is not None and plan.largest_params is not None:
        size = _billions(plan.largest_params)
        at_least = "at least " if plan.layers is not None and plan.largest_layers >= most_layers(plan.layers) else ""
        found = f"{at_least}{plan.largest_layers} layers, {size} parameters"
        lines.append(f"largest model of such layers that fits: {found}")
    return lines


def _best_time(plan: Plan) -> str:
    assert plan.best is not None
    return f"{plan.best.step_ms:,.1f} ms a step, {plan.best.ms_per_sequence:,.2f} ms a sequence"


def _billions(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:,.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:,.2f} MiB"


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, highlight=False, markup=False)
