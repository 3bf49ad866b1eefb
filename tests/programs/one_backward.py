"""Programs fit for the exchange inside backward: one backward before each step, and what it reads is not asked before.

Between the two, parameters are on the way to their next values, and nobody may look. A backward that was dropped would
have brought them all the same, where the plain rule waits for the step.
"""

from __future__ import annotations

import dataclasses

from tests.programs.draw import ON_GRADIENTS, Op, Program

OPTION = {"backwards_per_step": 1}
WRITES = ("edit", "edit_data", "load_weights")
DROP_GRADIENTS = ("broken_backward", "scaled_step", "drop_grad", "drop_all", "put_aside", "put_back")


def with_one_backward(program: Program) -> Program:
    blocks = [dataclasses.replace(block, checkpoint=False if block.checkpoint else None) for block in program.blocks]
    ops = [_with_option(op) for op in one_backward_a_step(program.ops)]
    late = {"update": "delayed", "delay_after": program.options["delay_after"] // 2}
    return dataclasses.replace(program, blocks=blocks, options={**program.options, **late, **OPTION}, ops=ops)


def _with_option(op: Op) -> Op:
    return Op(op.name, {**op.args, "options": {**op.args["options"], **OPTION}}) if "options" in op.args else op


def one_backward_a_step(ops: list[Op]) -> list[Op]:
    """Each backward is followed by a step and a zero_grad, with operations on gradients alone in between."""
    kept: list[Op] = []
    step = [Op("step"), Op("zero_grad", {"set_to_none": True})]
    is_open = False
    for op in ops:
        if op.name in DROP_GRADIENTS or (op.name == "backward" and is_open):
            continue
        if op.name == "step":
            kept += step if is_open else []
            is_open = False
            continue
        if is_open and op.name not in ON_GRADIENTS:
            kept += step
            is_open = False
        if op.name in WRITES:
            kept.append(Op("flush"))
        if op.name == "backward":
            is_open = True
            if op.args["how"] in ("twice", "retained"):
                op = Op(op.name, {**op.args, "how": "one"})
        kept.append(op)
        if op.name == "step_with_closure":
            kept.append(step[1])
    return kept + step if is_open else kept
