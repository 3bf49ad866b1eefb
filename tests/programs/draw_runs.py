"""What a second stream of random numbers adds to a program: the policy of the update, saved runs, kills.

It leaves every choice of the first stream where it was, so that a seed keeps its program when more is drawn here.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from tests.programs.draw import Op, Program, draw, draw_options
from tests.programs.one_backward import WRITES, with_one_backward


def draw_with_runs(seed: int) -> Program:
    return with_runs(draw(seed))


def with_runs(program: Program) -> Program:
    rng = random.Random(f"policy {program.seed}")
    ops = _with_room_for_writes(rng, program.ops)
    has_one_backward = rng.random() < 0.2
    options = {**program.options, **_policy(rng)}
    while rng.random() < 0.5:
        ops.insert(rng.randint(0, len(ops)), _alone(rng))
    while rng.random() < 0.4:
        saved = rng.randint(0, len(ops))
        ops.insert(rng.randint(saved, len(ops)), Op("resume", _resume(rng)))
        ops.insert(saved, Op("save_run", _save(rng)))
    for number, op in enumerate(ops):
        if op.name in ("reload", "resume"):
            ops[number] = Op(op.name, {**op.args, "options": {**op.args["options"], **_policy(rng)}})
    program = dataclasses.replace(program, options=options, ops=ops)
    return with_one_backward(program) if has_one_backward else program


def _policy(rng: random.Random) -> dict[str, Any]:
    return {"update": rng.choice(["synchronous", "delayed"]), "delay_after": rng.choice([0, 0, 1, 2, 4])}


def _with_room_for_writes(rng: random.Random, ops: list[Op]) -> list[Op]:
    """Most writes into parameters are made when nothing is late, or taken over after; the others are refused."""
    more: list[Op] = []
    for op in ops:
        chance = rng.random()
        if op.name in WRITES and chance < 0.6:
            more.append(Op("flush"))
        more.append(op)
        if op.name in WRITES and chance > 0.8:
            more.append(Op("refresh"))
    return more


def _alone(rng: random.Random) -> Op:
    name = rng.choice(["flush", "switch_update", "switch_update", "save_run", "resume"])
    if name == "flush":
        return Op(name)
    return Op(name, {"switch_update": _policy, "save_run": _save, "resume": _resume}[name](rng))


def _save(rng: random.Random) -> dict[str, Any]:
    return {"how": rng.choice(["zofftk", "torch", "direct"]), "optimizer_first": rng.random() < 0.5}


def _resume(rng: random.Random) -> dict[str, Any]:
    return {
        "options": draw_options(rng),
        "optimizer_first": rng.random() < 0.5,
        "frozen_as_saved": rng.random() < 0.5,
        "hand_over": rng.choice([None, "before", "after"]),
    }
