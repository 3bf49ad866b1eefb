"""Run a program on all ranks, and on one with the mean gradients beside it; the first difference is raised."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zofftk
from tests.rank_programs.data import spoilt, uses
from tests.rank_programs.draw import Program
from tests.rank_programs.sides import Side, gradient_of, merged_gradients
from zofftk.sharding.full import gather_full
from zofftk.sharding.saving import load_sharded, save_sharded

TIMEOUT_S = 6.0
_groups: dict[tuple[int, ...], Any] = {}


def group_of(ranks: range) -> Any:
    """Kept: it takes a while to make one."""
    key = tuple(ranks)
    if key not in _groups:
        timeout = timedelta(seconds=2 * TIMEOUT_S)
        _groups[key] = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    return _groups[key]


def count_groups_by_ranks() -> None:
    """torch names a group by its ranks and by how many groups there are, of whatever ranks, on each: here, where
    ranks take part in some programs and not in others, by how many there were of the same ranks."""
    counts: Counter[tuple[int, ...]] = Counter()

    def name(ranks: list[int]) -> str:
        counts[tuple(ranks)] += 1
        return f"group {counts[tuple(ranks)]} of {ranks}"

    dist.distributed_c10d._hash_ranks_to_str = name


def run(program: Program, rank: int, folder: Path) -> str | None:
    """What differs or fails, the same on all ranks of the world; None where nothing does."""
    runner, fault = Runner(program, rank, folder), None
    try:
        runner.run()
    except Exception as error:
        fault = f"rank {rank}, after {runner.at}: {type(error).__name__}: {str(error)[:600]}"
    finally:
        with suppress(Exception):
            runner.close()
    faults: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    # What came of another rank's fault, last.
    found = sorted(filter(None, faults), key=lambda fault: any(word in fault for word in ("RankError", "Wait timeout")))
    return "\n".join([*found, str(program)]) if found else None


class Runner:
    """One rank's view. Every rank follows how far the program has come, also where it takes no part."""

    def __init__(self, program: Program, rank: int, folder: Path) -> None:
        self.program, self.rank, self.folder = program, rank, folder
        self.size = program.size
        self.at = "construction"
        self.sharded: Side | None = None
        self.alone: Side | None = None
        self.weight_of: list[int] = []  # of each block: its parameter
        for spec in program.blocks:
            self.weight_of.append(self.weight_of[-1] if spec.kind == "tied" else max(self.weight_of, default=-1) + 1)
        firsts = [self.weight_of.index(i) for i in range(self.weight_of[-1] + 1)]
        held = [i for i, first in enumerate(firsts) if not program.blocks[first].held_back]
        self.held_back = [i for i in range(len(firsts)) if i not in held]
        count = len(program.groups)
        self.position: dict[str, Any] = {
            "groups": [(program.groups[g], held[g::count]) for g in range(count)],
            "trained": [not program.blocks[first].frozen for first in firsts],
            "update": {key: program.options[key] for key in ("update", "delay_after") if key in program.options},
        }
        self.present: list[set[int]] = [set() for _ in range(4)]  # of each rank: parameters with a gradient
        self.came = [False] * 4  # of each rank: gradients since all ranks did the same
        self.unseen: set[int] = set()  # unfrozen, and not noticed yet
        self.updated: set[int] = set()  # parameters that have had a gradient at a step
        self.is_spent = self.is_spoilt = False
        self.is_even = True  # the ranks have had the same backwards since they met

    @property
    def takes_part(self) -> bool:
        return self.rank < self.size

    def run(self) -> None:
        if self.rank == 0:
            self.alone = Side(self.program, self.position, group_of(range(1)), seed=None)
        self.open()
        for number, op in enumerate(self.program.ops):
            self.at = f"{number} {op}"
            getattr(self, op.name)(**op.args)
        self.at = "the end"
        self.check_states()
        for side in self.both:
            side.opt.flush()
        self.check()

    @property
    def both(self) -> list[Side]:
        return [side for side in (self.sharded, self.alone) if side is not None]

    def open(self) -> None:
        if not self.takes_part:
            return
        options = {**self.program.sharded_options, "rank_timeout_s": TIMEOUT_S}
        seed = self.program.seed + self.rank
        self.sharded = Side(self.program, self.position, group_of(range(self.size)), seed=seed, **options)
        if self.program.is_handed_over:
            zofftk.offload(self.sharded.model, self.sharded.opt)

    def close(self) -> None:
        for side in self.both:
            side.opt.close()
        self.sharded = self.alone = None

    @property
    def is_alike(self) -> bool:
        first = self.present[0]
        return not self.unseen and all(present == first for present in self.present[: self.size])

    # -- operations --------------------------------------------------------------------------------------------

    def backward(self, **args: Any) -> None:
        if self.is_spent:
            self.zero_grad("opt")
        used = uses(self.program, args, self.size)
        hidden = set(self.held_back)
        used = [[[b for b in blocks if self.weight_of[b] not in hidden] for blocks in micros] for micros in used]
        bad = spoilt(args, used)
        self.is_spoilt |= bad is not None
        for micro, blocks in enumerate(used[self.rank] if self.sharded is not None else []):
            places = {b: (self.rank, micro, b) for b in blocks}
            gradients = {b: gradient_of(self.program, args, self.size, place, bad) for b, place in places.items()}
            self.sharded.backward(gradients, args["data"] + self.rank)
        if self.alone is not None:
            self.alone.backward(merged_gradients(self.program, args, self.size, used, bad))
        self.is_even &= all(micros == used[0] for micros in used[: self.size])
        for rank, micros in enumerate(used):
            brought = {self.weight_of[b] for blocks in micros for b in blocks}
            brought = {i for i in brought if self.position["trained"][i]}
            self.present[rank] |= brought
            self.came[rank] |= bool(brought - self.unseen)

    def step(self) -> None:
        for side in self.both:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "a step was skipped")  # the first time, and compared below
                side.opt.step()
        self.is_spent, self.unseen, self.came, self.is_even = True, set(), [False] * 4, True
        self.updated |= set().union(*self.present)
        if self.is_spoilt:  # the step was skipped: what one rank has, the others have from here on
            self.present = [set().union(*self.present) for _ in range(4)]
        if self.sharded is not None and self.alone is not None:
            ours, one = self.sharded.opt, self.alone.opt
            assert (ours.last_step_skipped, ours.loss_scale) == (one.last_step_skipped, one.loss_scale), "skipped"
            norms = ours.last_grad_norm, one.last_grad_norm
            is_same = norms[0] == norms[1] or (
                self.size == 3 and None not in norms and math.isclose(*norms, rel_tol=1e-12)
            )
            is_same |= not self.is_exact or (None not in norms and not any(map(math.isfinite, norms)))
            assert is_same, f"norms {norms}"

    is_exact = True

    def zero_grad(self, how: str) -> None:
        if len(set(self.came[: self.size])) == 2:
            self.step()  # gradients are not to be dropped before every rank has some
        self.came = [False] * 4
        is_kept = self.is_spoilt or not self.is_spent  # by the ranks that have it
        if is_kept and not (self.is_even and self.is_alike):
            how = "opt"  # that of the model drops other gradients on each rank, which is refused
        self.is_even = True
        for side in self.both:
            target = side.model if how.startswith("model") else side.opt
            target.zero_grad(set_to_none=not how.endswith("zeros"))
        self.is_spent = False
        if not how.endswith("zeros"):
            self.present = [set() for _ in range(4)]
            self.is_spoilt = False
        if how.startswith("opt"):
            self.unseen = set()

    def clip(self, max_norm: float) -> None:
        if self.is_alike and not self.is_spoilt and not self.is_spent and self.size != 3:
            if any(self.present):
                self.came = [False] * 4
            norms = [torch.nn.utils.clip_grad_norm_(side.params, max_norm).item() for side in self.both]
            assert len(set(norms)) <= 1, f"norms {norms}"

    def read_grad(self, param: int) -> None:
        param %= len(self.position["trained"])
        if not self.is_alike or self.is_spent or param not in self.present[0]:
            return
        self.came = [False] * 4
        grads = [side.opt.grad(side.params[param]) for side in self.both]
        if len(grads) == 2 and self.size != 3:
            assert torch.equal(grads[0].nan_to_num(), grads[1].nan_to_num()), f"gradient {param}"

    def evaluate(self) -> None:
        values = [side.evaluate() for side in self.both]
        assert all(value == values[0] for value in values), "values of the model"

    def edit(self, param: int, data: int) -> None:
        for side in self.both:
            side.opt.flush()
            with torch.no_grad():
                weight = side.params[param % len(side.params)]
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(data)))

    def freeze(self, param: int) -> None:
        self._train(param, False)

    def unfreeze(self, param: int) -> None:
        self._train(param, True)

    def _train(self, param: int, is_trained: bool) -> None:
        param %= len(self.position["trained"])
        if is_trained and not self.position["trained"][param]:
            self.unseen.add(param)
        self.position["trained"][param] = is_trained
        for side in self.both:
            side.params[param].requires_grad_(is_trained)

    def switch(self, update: str, delay_after: int) -> None:
        self.position["update"] = {"update": update, "delay_after": 0}
        for side in self.both:
            side.opt.switch_update(update, 0)

    def flush(self) -> None:
        for side in self.both:
            side.opt.flush()

    def synchronize(self) -> None:
        for side in self.both:
            side.opt.synchronize()
        self.check()

    def lr(self, group: int, lr: float) -> None:
        for side in self.both:
            groups = side.opt.param_groups
            groups[group % len(groups)]["lr"] = lr

    def add_group(self, hyper: dict[str, Any]) -> None:
        if self.held_back:
            self.came = [False] * 4 if any(self.position["trained"][i] for i in self.held_back) else self.came
            for side in self.both:
                side.opt.add_param_group({"params": [side.params[i] for i in self.held_back], **hyper})
            self.position["groups"].append((hyper, self.held_back))
            self.held_back = []

    def resize(self, size: int) -> None:
        """Save the states, and go on with them on another number of ranks."""
        # `load_sharded` has no place for the states of parameters that are frozen.
        are_frozen = any(not self.position["trained"][i] for i in self.updated)
        if any(self.present) or self.is_spent or self.unseen or are_frozen:
            return
        self.check()
        if self.sharded is not None:
            content = {"model": self.sharded.model, "optimizer": self.sharded.opt}
            save_sharded(content, self.folder / "checkpoint", group_of(range(self.size)))
            self.sharded.opt.close()
            self.sharded = None
        dist.barrier(group_of(range(4)))
        self.size = size
        self.open()
        if self.sharded is not None:
            content = {"model": self.sharded.model, "optimizer": self.sharded.opt}
            load_sharded(content, self.folder / "checkpoint", group_of(range(size)))
        dist.barrier(group_of(range(4)))
        if self.alone is not None:
            self.alone.opt.last_grad_norm, self.alone.opt.last_step_skipped = None, False

    # -- comparison --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The parameters, of all ranks and of the one."""
        if self.sharded is None:
            return
        values = [param.detach().clone() for param in self.sharded.params]
        flat = torch.cat([value.view(torch.uint8) for value in values])
        others = [torch.empty_like(flat) for _ in range(self.size)]
        dist.all_gather(others, flat, group=group_of(range(self.size)))
        for rank, other in enumerate(others):
            assert torch.equal(flat, other), f"ranks {self.rank} and {rank} differ"
        if self.alone is not None:
            for number, (value, param) in enumerate(zip(values, self.alone.params, strict=True)):
                assert torch.equal(value, param), f"parameter {number}: {first_difference(value, param.detach())}"

    def check_states(self) -> None:
        """Masters and moments, with what was edited since: one rank without gradients leaves that to the next step."""
        for side in self.both:
            side.opt.state_dict()
        if self.sharded is None:
            return
        states = [dict(self.sharded.opt.state.get(param, {})) for param in self.sharded.params]
        for number, full in enumerate(gather_full(states, group_of(range(self.size)), dst=None)):
            if self.alone is not None:
                one = dict(self.alone.opt.state.get(self.alone.params[number], {}))
                assert full.keys() == one.keys(), f"states of {number}: {[*full]} and {[*one]}"
                for key, value in full.items():
                    assert torch.equal(value, one[key]), f"{key} of {number}: {first_difference(value, one[key])}"


def first_difference(ours: torch.Tensor, one: torch.Tensor) -> str:
    places = (ours.flatten() != one.flatten()).nonzero().flatten()
    at = int(places[0]) if len(places) else 0
    return f"{len(places)} of {ours.numel()}, at {at} {ours.flatten()[at].item()} for {one.flatten()[at].item()}"


def run_all(programs: list[Program], rank: int) -> tuple[int, str] | None:
    """The seed of the first program that fails, and how."""
    count_groups_by_ranks()
    with tempfile.TemporaryDirectory() as own:
        folders: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(folders, own)
        for program in programs:
            if (fault := run(program, rank, Path(folders[0]) / str(program.seed))) is not None:
                return program.seed, fault
        dist.barrier()
    return None
