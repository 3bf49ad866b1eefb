"""States cut into uneven ranges over ranks, as a sharded engine has them."""

from __future__ import annotations

import random
from itertools import pairwise
from math import prod

import torch

from zofftk.cpu_adam import adamw_step
from zofftk.sharding.state import ShardedState

SHAPES = [(7,), (3, 5), (1,), (), (0,), (2, 0, 3), (2, 3, 4), (40, 9)]
STATES = ("master", "exp_avg", "exp_avg_sq")


def ranges(numel: int, size: int, seed: int, most: int = 9) -> list[list[tuple[int, int]]]:
    """Of each rank, its ranges: several, uneven, none on some."""
    draw = random.Random(seed)
    cuts = sorted({0, numel, *(draw.randrange(numel + 1) for _ in range(draw.randrange(most)))})
    owned: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    for start, stop in pairwise(cuts):
        owned[draw.randrange(size)].append((start, stop))
    return owned


def sharded(full: torch.Tensor, rank: int, size: int, seed: int) -> ShardedState:
    """This rank's part of `full`, in an arena of its own."""
    mine = ranges(full.numel(), size, seed)[rank]
    arena = torch.full((sum(stop - start for start, stop in mine) + 8 * len(mine) + 1,), torch.nan, dtype=full.dtype)
    parts, at = [], 0
    for start, stop in mine:
        values = arena[at : at + stop - start]
        values.copy_(full.reshape(-1)[start:stop])
        parts.append((start, values))
        at += stop - start + 8
    return ShardedState(full.shape, full.dtype, parts)


def whole(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(prod(shape), generator=torch.Generator().manual_seed(seed)).view(shape)


States = dict[int, dict[str, torch.Tensor]]


def whole_states(shapes: list[tuple[int, ...]] = SHAPES) -> States:
    """As `optimizer.state_dict()["state"]`, at step 0."""
    return {
        number: {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros(shape),
            "exp_avg_sq": torch.zeros(shape),
            "master": whole(shape, number),
        }
        for number, shape in enumerate(shapes)
    }


def shard_states(
    states: dict[int, dict[str, torch.Tensor]], rank: int, size: int
) -> dict[int, dict[str, torch.Tensor]]:
    return {
        number: {
            name: value if name == "step" else sharded(value, rank, size, seed=100 * size + number)
            for name, value in state.items()
        }
        for number, state in states.items()
    }


def update(states: States, step: int) -> None:
    """One AdamW step, on whole states or on a rank's parts, with the same gradient."""
    for number, state in states.items():
        gradient = whole(tuple(state["master"].shape), 1000 * step + number).view(-1)
        state["step"].fill_(step)
        if isinstance(state["master"], ShardedState):
            columns = [state[name].parts for name in STATES]
            rows = [
                ([part.values for part in row], gradient[row[0].start : row[0].stop])
                for row in zip(*columns, strict=True)
            ]
        else:
            rows = [([state[name].view(-1) for name in STATES], gradient)]
        for (master, first, second), mine in rows:
            adamw_step(
                master, first, second, mine.clone(), step=step, lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1
            )
