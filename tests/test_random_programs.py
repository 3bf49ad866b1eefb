"""Random training programs: the engine against a plain reference of its documented rules, bit for bit.

`--programs N` runs N of them, `--program SEED` one alone.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.programs.draw import draw
from tests.programs.draw_runs import draw_with_runs
from tests.programs.follower import follow, followable
from tests.programs.one_backward import with_one_backward
from tests.programs.run import difference, run, shrink
from zofftk.cpu_adam import adamw_step
from zofftk.cpu_sgd import sgd_step
from zofftk.device.emulated import EmulatedDevice

pytestmark = pytest.mark.usefixtures("no_threads_left")
BLOCK = 50
# Each showed a fault of the engine, with what `draw` makes of it. A change of `draw` makes other programs of them.
FAILED_ONCE = [
    *(0, 4, 8, 10, 16, 40, 44, 58, 98, 124, 245, 248, 260, 274, 279, 307, 468, 489, 532, 615, 718, 742, 872, 878),
    *(994, 1034, 1088, 1117, 1182, 223, 319, 556, 4981, 5600),
]
FAILED_WITH_RUNS = [5, 36, 41, 45, 60, 65, 72, 135, 141, 146, 179, 306, 355, 535]  # add new ones at the end


def pytest_generate_tests(metafunc):
    one = metafunc.config.getoption("program")
    if "seeds" in metafunc.fixturenames:
        count = metafunc.config.getoption("programs") if one is None else 0
        blocks = [range(i, min(i + BLOCK, count)) for i in range(0, count, BLOCK)]
        blocks += [FAILED_ONCE, FAILED_WITH_RUNS] if one is None else [[one]]
        metafunc.parametrize("seeds", blocks, ids=lambda seeds: f"{seeds[0]}+{len(seeds)}" if seeds else "none")


@pytest.mark.parametrize("kind", ["reference", "torch"])
def test_a_program_ends_as_the_plain_reference(seeds, kind):
    """And the reference, where torch's own optimizer can follow, as torch."""
    for seed in seeds if kind == "reference" else seeds[::4]:
        print("program", seed)
        program, runs = (draw_with_runs(seed), run) if kind == "reference" else (followable(seed), follow)
        if seeds is FAILED_ONCE and kind == "reference":
            program = dataclasses.replace(draw(seed), optimizer="AdamW")  # which they failed with
        if (found := difference(program, runs)) is not None:
            small = shrink(program, runs)
            pytest.fail(f"{found}\n\nmade smaller, {difference(small, runs)}:\n{small}", pytrace=False)


def test_a_fault_is_found_and_its_program_made_small(monkeypatch):
    monkeypatch.setattr("zofftk.clipping.coefficient", lambda norm, max_norm: 1.0)
    found = next(program for program in map(draw_with_runs, range(50)) if difference(program))
    small = shrink(found)
    assert len(small.ops) < len(found.ops)
    assert "step" in str(small.ops[-1])


@pytest.mark.parametrize(
    ("where", "kernel"),
    [
        ("tests.programs.optimizers.adamw_step", adamw_step),
        ("tests.programs.optimizers.sgd_step", sgd_step),
    ],
)
def test_the_anchor_sees_a_small_fault_of_the_reference(monkeypatch, where, kernel):
    def slightly_wrong(*args, weight_decay, **options):
        return kernel(*args, weight_decay=weight_decay * 1.01, **options)

    monkeypatch.setattr(where, slightly_wrong)
    assert any(difference(followable(seed), follow) for seed in range(20))


@pytest.mark.parametrize("drawn", [draw, draw_with_runs])
def test_a_seed_gives_the_same_program_again(drawn):
    assert str(drawn(7)) == str(drawn(7)) != str(drawn(8))


def test_what_is_added_leaves_the_choices_of_a_seed_as_they_are():
    for seed in range(30):
        base, program = draw(seed), draw_with_runs(seed)
        assert base.options.items() <= program.options.items()
        blocks = program.blocks if "backwards_per_step" in program.options else base.blocks
        base = dataclasses.replace(base, ops=program.ops, options=program.options, blocks=blocks)
        assert program == base


def test_values_go_up_inside_backward_where_there_is_one_a_step(monkeypatch):
    inside = []
    copy_up = EmulatedDevice.copy_up

    def noted(*args):
        inside.append(torch._C._current_graph_task_id() != -1)
        copy_up(*args)

    monkeypatch.setattr(EmulatedDevice, "copy_up", noted)
    for seed in range(12):
        assert difference(with_one_backward(draw_with_runs(seed))) is None
    assert any(inside)
