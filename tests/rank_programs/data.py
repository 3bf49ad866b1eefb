"""The gradients of a program's micro-batches: small multiples of a power of two, so that sums and means are exact."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.rank_programs.draw import Program


def uses(program: Program, args: dict[str, Any], size: int) -> list[list[list[int]]]:
    """Of each rank and micro-batch: the blocks it uses."""
    rng = random.Random(f"uses {args['data']}")
    blocks = range(len(program.blocks))
    share = 1.0 if program.all_use_all else 0.75
    return [[[b for b in blocks if rng.random() < share] for _ in range(args["micros"][rank])] for rank in range(size)]


def block_gradient(
    program: Program, args: dict[str, Any], size: int, rank: int, micro: int, block: int
) -> torch.Tensor:
    """fp32; of all that this block does in this micro-batch."""
    generator = torch.Generator().manual_seed(args["data"] * 64 + rank * 16 + micro * 5 + block)
    spec = program.blocks[block]
    values = torch.randint(-2, 3, (spec.numel,), generator=generator).float() / 4
    # Thirds of these are exact as well.
    return values * (3 if size == 3 else 1) * (2 if spec.kind == "twice" else 1)


def spoilt(args: dict[str, Any], used: list[list[list[int]]]) -> tuple[int, int, int] | None:
    """The rank, micro-batch and block whose gradient is not finite."""
    places = [(r, m, b) for r, micros in enumerate(used) for m, blocks in enumerate(micros) for b in blocks]
    return random.Random(args["data"]).choice(places) if args["inf"] and places else None
