"""One random program from one integer: a model, an optimizer and a list of operations, all of it plain data.

Every operation stands for itself: any of them may be left out, and the rest is a program again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.programs.models import KINDS, BlockSpec
from tests.programs.optimizers import OPTIMIZERS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ON_GRADIENTS = (
    *("clip", "drop_grad", "set_grad", "mul_grad", "mul_grad", "div_grad", "add_grad", "zero_one", "read_grad"),
    *("read_norm", "refused", "put_aside", "put_back", "drop_all", "copy_grad", "freeze", "unfreeze"),
)
BETWEEN = (
    *("change", "schedule", "freeze", "unfreeze", "unfreeze", "add_group", "load_weights", "edit", "edit_data"),
    *("refresh", "save", "load", "reload", "delete_state", "evaluate", "hand_over", "take_back", "check"),
    *("tensor_lr", "edit_state", "load_damaged", "copy_model"),
)


@dataclass(frozen=True)
class Op:
    """The name of a method of the two sides, and its arguments."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.args.items())})"


@dataclass(frozen=True)
class Program:
    seed: int
    width: int
    blocks: list[BlockSpec]
    frozen: list[int]  # positions of parameters frozen from the start
    held_back: list[int]  # blocks that the optimizer does not hold at first
    groups: list[dict[str, Any]]  # hyper-parameters in AdamW's terms; parameter i goes to group i modulo their number
    named: bool
    options: dict[str, Any]  # of the optimizer
    checked: bool  # the model's own reads and writes are watched
    ops: list[Op]
    optimizer: str = "AdamW"

    def __str__(self) -> str:
        lines = [f"program {self.seed}: {self.optimizer}, width {self.width}"]
        lines += [f"  block {i}: {spec}" for i, spec in enumerate(self.blocks)]
        lines.append(f"  frozen {self.frozen}, held back {self.held_back}, {'named' if self.named else 'not named'}")
        lines += [f"  group {i}: {group}" for i, group in enumerate(self.groups)]
        lines.append(f"  options {self.options}{', checked access' if self.checked else ''}")
        return "\n".join(lines + [f"  {i:3} {op}" for i, op in enumerate(self.ops)])


def draw(seed: int) -> Program:
    """See `draw_runs` for what is added to it."""
    rng = random.Random(seed)
    blocks = [_block(rng) for _ in range(rng.randint(1, 4))]
    return Program(
        seed=seed,
        width=rng.choice([1, 3, 8, 16]),
        blocks=blocks,
        frozen=[i for i in range(12) if rng.random() < 0.1],
        held_back=[i for i in range(1, len(blocks)) if rng.random() < 0.15],
        groups=[_group(rng) for _ in range(rng.choice([1, 1, 2, 3]))],
        named=rng.random() < 0.5,
        options=draw_options(rng),
        checked=rng.random() < 0.1,
        ops=_ops(rng),
        optimizer=random.Random(f"optimizer of {seed}").choice(["AdamW"] * 4 + [*OPTIMIZERS]),
    )


def _block(rng: random.Random) -> BlockSpec:
    return BlockSpec(
        kind=rng.choice(KINDS),
        dtype=rng.choice(DTYPES),
        checkpoint=rng.choice([None, None, False, True]),
        optional=rng.random() < 0.3,
        again=rng.random() < 0.2,
    )


def _group(rng: random.Random) -> dict[str, Any]:
    return {
        "lr": rng.choice([1e-3, 0.01, 0.1]),
        "betas": rng.choice([(0.9, 0.999), (0.8, 0.95), (0.0, 0.99)]),
        "eps": rng.choice([1e-8, 1e-5]),
        "weight_decay": rng.choice([0.0, 0.01, 0.3]),
    }


def draw_options(rng: random.Random) -> dict[str, Any]:
    return {
        "max_grad_norm": rng.choice([None, None, 0.3, 5.0]),
        "wire_dtype": rng.choice([None, None, None, *DTYPES]),
        "bucket_bytes": rng.choice([None, 1, 10_000, 40_000]),
        "staging_slots": rng.randint(1, 3),
        "threads": rng.choice([1, 2, 3]),
    }


# -- operations ----------------------------------------------------------------------------------------------------


def _ops(rng: random.Random) -> list[Op]:
    ops: list[Op] = []
    if rng.random() < 0.4:
        ops.append(Op("hand_over"))
    for _ in range(rng.randint(2, 6)):
        while rng.random() < 0.4:
            ops.append(_between(rng))
        for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 2, 3])):
            ops.append(_backward(rng))
            while rng.random() < 0.3:
                ops.append(_on_gradients(rng))
        ops += _step(rng)
        if rng.random() < 0.1:
            ops.append(_on_gradients(rng))
        if rng.random() < 0.85:
            ops.append(Op("zero_grad", {"set_to_none": rng.random() < 0.8}))
        if rng.random() < 0.2:
            ops.append(Op("check"))
    return ops


def _data(rng: random.Random) -> dict[str, Any]:
    return {"data": rng.randrange(1000), "skip": rng.choice([0, 0, rng.randrange(16)])}


def _weight(rng: random.Random) -> float:
    return rng.choice([1.0, 1.0, 0.5, 0.37, -3.0, 100.0]) if rng.random() > 0.03 else float("inf")


def _backward(rng: random.Random) -> Op:
    if rng.random() < 0.05:
        return Op("broken_backward", {**_data(rng), "breaks": rng.randrange(4)})
    how = rng.choice(["one", "one", "one", "both", "twice", "retained", "inputs"])
    return Op("backward", {**_data(rng), "weight": _weight(rng), "how": how, "autocast": rng.random() < 0.1})


def _step(rng: random.Random) -> list[Op]:
    kind = rng.choice(["step"] * 5 + ["clip"] * 3 + ["scaled"] * 2 + ["closure", "none"])
    if kind == "scaled":
        clip = rng.choice([None, 0.5, 10.0])
        return [Op("scaled_step", {**_data(rng), "weight": _weight(rng), "clip": clip})]
    if kind == "closure":
        return [Op("step_with_closure", {**_data(rng), "weight": _weight(rng)})]
    if kind == "clip":
        return [_clip(rng), Op("step")]
    return [Op("step")] if kind == "step" else []


def _clip(rng: random.Random) -> Op:
    how = rng.choice(["plain", "plain", "foreach", "strict", "in two"])
    return Op("clip", {"every": rng.choice([1, 1, 2, 3]), "max_norm": rng.choice([0.1, 1.0, 7.3, 1e6]), "how": how})


def _param(rng: random.Random) -> dict[str, Any]:
    return {"param": rng.randrange(12)}


def _on_gradients(rng: random.Random) -> Op:
    """Something done to what backward has left."""
    name = rng.choice(ON_GRADIENTS)
    if name == "clip":
        return _clip(rng)
    args = {} if name == "drop_all" else _param(rng)
    if name in ("mul_grad", "div_grad"):
        args |= {"factor": rng.choice([0.5, 0.3, -1.7, 1.0, 1e3]), "as_tensor": rng.random() < 0.3}
    elif name == "set_grad":
        args |= {"data": rng.randrange(1000), "bad": rng.random() < 0.1, "wide": rng.random() < 0.2}
    elif name == "add_grad":
        args |= {"data": rng.randrange(1000), "alpha": rng.choice([1, 1, -1, 0.3]), "wide": rng.random() < 0.3}
    elif name == "refused":
        args |= {"how": rng.choice(["clip_value", "inf_norm", "plus", "numpy"])}
    return Op(name, args)


def _between(rng: random.Random) -> Op:
    """Something done between steps; gradients may be there."""
    name = rng.choice(BETWEEN)
    if name in ("freeze", "unfreeze"):
        return Op(name, _param(rng))
    if name == "edit_state":
        return Op(name, _param(rng))
    if name == "tensor_lr":
        return Op(name, {"group": rng.randrange(3), "lr": rng.choice([0.01, 0.003])})
    if name == "load_damaged":
        return Op(name, {"damage": rng.choice(["shape", "step", "groups", "lr"])})
    if name == "change":
        key = rng.choice(["lr", "betas", "eps", "weight_decay"])
        return Op(name, {"group": rng.randrange(3), "key": key, "value": _group(rng)[key]})
    if name == "add_group":
        return Op(name, {"hyper": _group(rng)})
    if name == "load_weights":
        return Op(name, {"data": rng.randrange(1000)})
    if name == "edit":
        return Op(name, {**_param(rng), "data": rng.randrange(1000)})
    if name == "edit_data":
        return Op(name, {**_param(rng), "data": rng.randrange(1000), "refresh": rng.random() < 0.7})
    if name == "load":
        return Op(name, {"which": rng.randrange(3)})
    if name == "reload":
        return Op(name, {"options": draw_options(rng)})
    if name == "delete_state":
        return Op(name, {**_param(rng), "how": rng.choice(["del", "clear"])})
    if name == "evaluate":
        return Op(name, _data(rng))
    return Op(name)
