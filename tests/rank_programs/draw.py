"""One random program over ranks from one integer: parameters, an optimizer and a list of operations, all plain data.

Every operation may be left out, and the rest is a program again. What a rank's micro-batch uses and which gradients it
brings follow from integers as well, so every rank knows those of all.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import torch

from tests.programs.draw import Op

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (2, 2, 3, 4)
KINDS = ("plain", "plain", "plain", "tied", "twice")
NUMELS = (0, 1, 5, 64, 700, 4096, 4097, 9000, 20_000)
BETWEEN = ("evaluate", "edit", "freeze", "unfreeze", "switch", "flush", "synchronize", "lr", "resize", "add_group")


@dataclass(frozen=True)
class BlockSpec:
    kind: str  # tied: its weight is that of the block before; twice: a forward uses it two times
    numel: int
    dtype: torch.dtype
    frozen: bool  # from the start
    held_back: bool  # the optimizer does not hold it at first


@dataclass(frozen=True)
class Program:
    seed: int
    size: int  # ranks
    blocks: list[BlockSpec]
    groups: list[dict[str, Any]]  # parameter i goes to group i modulo their number
    options: dict[str, Any]
    sharded_options: dict[str, Any]  # those that one rank does without
    is_handed_over: bool
    all_use_all: bool  # no rank leaves out a parameter
    ops: list[Op]

    def __str__(self) -> str:
        lines = [f"program {self.seed} on {self.size} ranks{', handed over' if self.is_handed_over else ''}"]
        lines += [f"  block {i}: {spec}" for i, spec in enumerate(self.blocks)]
        lines += [f"  group {i}: {group}" for i, group in enumerate(self.groups)]
        lines.append(f"  options {self.options} {self.sharded_options}{', all use all' if self.all_use_all else ''}")
        return "\n".join(lines + [f"  {i:3} {op}" for i, op in enumerate(self.ops)])


def draw(seed: int) -> Program:
    rng = random.Random(f"over ranks {seed}")
    size = rng.choice(SIZES)
    late = rng.random() < 0.4
    update = {"update": "delayed", "delay_after": rng.choice([0, 1, 2])} if late else {}
    return Program(
        seed=seed,
        size=size,
        blocks=_blocks(rng),
        groups=[_group(rng) for _ in range(rng.choice([1, 1, 2, 3]))],
        options={
            # Of three ranks, a clipped mean is not the one rank's to the last bit.
            "max_grad_norm": rng.choice([None, None, 0.3, 50.0]) if size != 3 else None,
            "loss_scale": rng.choice([None, None, 8.0, "adapts"]),
            **update,
        },
        sharded_options={
            "bucket_bytes": rng.choice([None, 1, 20_000, 100_000]),
            "staging_slots": rng.randint(1, 3),
            "wire_dtype": rng.choice([None, None, torch.float32]),
            "reduce_dtype": rng.choice([None, torch.float32]),
        },
        is_handed_over=rng.random() < 0.4,
        all_use_all=rng.random() < 0.4,
        ops=_ops(rng, size),
    )


def _blocks(rng: random.Random) -> list[BlockSpec]:
    blocks: list[BlockSpec] = []
    for number in range(rng.randint(1, 5)):
        block = BlockSpec(
            kind=rng.choice(KINDS) if number else "plain",
            numel=rng.choice(NUMELS),
            dtype=rng.choice(DTYPES),
            frozen=rng.random() < 0.1,
            held_back=number > 0 and rng.random() < 0.15,
        )
        blocks.append(dataclasses.replace(blocks[-1], kind="tied") if block.kind == "tied" else block)
    return blocks


def _group(rng: random.Random) -> dict[str, Any]:
    return {
        "lr": rng.choice([1e-3, 0.01, 0.1]),
        "betas": rng.choice([(0.9, 0.999), (0.8, 0.95)]),
        "eps": rng.choice([1e-8, 1e-5]),
        "weight_decay": rng.choice([0.0, 0.3]),
    }


def _ops(rng: random.Random, size: int) -> list[Op]:
    ops: list[Op] = []
    for _ in range(rng.randint(2, 6)):
        while rng.random() < 0.35:
            ops.append(_between(rng))
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            ops.append(_backward(rng))
            if rng.random() < 0.15:
                ops.append(Op("unfreeze" if rng.random() < 0.3 else "read_grad", {"param": rng.randrange(8)}))
        if rng.random() < 0.2:
            ops.append(Op("zero_grad", {"how": "opt"}))  # dropped
            continue
        if size != 3 and rng.random() < 0.25:
            ops.append(Op("clip", {"max_norm": rng.choice([0.3, 7.3, 1e6])}))
        ops.append(Op("step"))
        ops.append(Op("zero_grad", {"how": rng.choice(["opt", "opt", "opt", "opt zeros", "model", "model zeros"])}))
    return ops


def _backward(rng: random.Random) -> Op:
    """Each rank's number of micro-batches, and on which of them a gradient is not finite."""
    micros = [rng.choice([1, 1, 1, 2, 3, 0]) for _ in range(4)] if rng.random() < 0.5 else [rng.choice([1, 1, 2])] * 4
    return Op("backward", {"data": rng.randrange(10**6), "micros": micros, "inf": rng.random() < 0.07})


def _between(rng: random.Random) -> Op:
    name = rng.choice(BETWEEN)
    if name in ("freeze", "unfreeze"):
        return Op(name, {"param": rng.randrange(8)})
    if name == "edit":
        return Op(name, {"param": rng.randrange(8), "data": rng.randrange(10**6)})
    if name == "switch":
        return Op(name, {"update": rng.choice(["synchronous", "delayed"]), "delay_after": rng.choice([0, 3])})
    if name == "lr":
        return Op(name, {"group": rng.randrange(3), "lr": rng.choice([0.01, 0.03])})
    if name == "resize":
        return Op(name, {"size": rng.choice([1, 2, 4])})
    if name == "add_group":
        return Op(name, {"hyper": _group(rng)})
    return Op(name)
