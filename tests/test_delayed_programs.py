"""Random delayed runs: everything that may happen between two steps, in any order, against the rule."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.delayed_rule import HYPER, MODES, Pair, loss_of

pytestmark = [
    pytest.mark.usefixtures("no_threads_left", "at_once"),
    pytest.mark.filterwarnings("ignore:a step was skipped"),
]
SEEDS = range(30)


class Mixed(nn.Module):
    """Four layers, of which a step uses some; the second twice, the third recomputed, the fourth tied to the first."""

    def __init__(self, dtype: torch.dtype, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=i != 3) for i in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.to(dtype)
        self.reentrant, self.used = reentrant, 15

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if not self.used >> i & 1:
                continue
            if i == 2 and torch.is_grad_enabled():
                y = checkpoint(layer, x, use_reentrant=self.reentrant)
            else:
                y = layer(torch.tanh(layer(x))) if i == 1 else layer(x)
            x = x + torch.tanh(y)
        return x


class Run:
    """One program; `log` is what it has done."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.kind = rng.choice(["AdamW", "AdamW", *HYPER])
        self.mode = rng.choice([*MODES.values()])
        dtype, reentrant = rng.choice([torch.bfloat16, torch.float32]), rng.random() < 0.5
        self.policy = self.draw_policy()
        self.max_grad_norm = rng.choice([None, 0.5])
        options = {"staging_slots": rng.randint(1, 3), "bucket_bytes": rng.choice([1, 1 << 20])}

        def groups(model):
            parts = [[*model.layers[0].parameters()], [*model.layers[1].parameters(), *model.layers[2].parameters()]]
            return [{"params": parts[0], "lr": 2e-2}, {"params": parts[1]}]

        self.log = [self.kind, self.mode, dtype, reentrant, self.policy, self.max_grad_norm, options]
        self.pair = Pair(
            lambda: Mixed(dtype, reentrant),
            self.mode,
            self.kind,
            groups=groups,
            max_grad_norm=self.max_grad_norm,
            **options,
            **self.policy,
        )
        self.pair.plain.delay_after = self.delay()

    def draw_policy(self) -> dict:
        update = self.rng.choice(["delayed", "delayed", "synchronous"])
        return {"update": update, "delay_after": self.rng.choice([0, 0, 1, 3, 6])}

    def delay(self) -> int:
        return 1000 if self.policy["update"] == "synchronous" else self.policy["delay_after"]

    def sides(self):
        return ((self.pair.model, self.pair.opt), (self.pair.twin, self.pair.plain))

    # -- what happens ------------------------------------------------------------------------------------------

    def step(self, *, may_drop: bool = True) -> None:
        used, overflows = self.rng.choice([15, 15, 15, 7, 5, 3]), self.rng.random() < 0.1
        many = self.rng.choice([1, 1, 2, 3]) if "backwards_per_step" not in self.mode else 1
        self.log.append(("step", used, overflows, many))

        def loss(model, step):
            model.used = used
            return loss_of(model, step).clamp(max=1e4) * (float("inf") if overflows else 1.0)

        for micro in range(many):
            self.pair.backward(loss, 5 * self.pair.steps + micro)
        if may_drop and "backwards_per_step" not in self.mode and self.rng.random() < 0.1:
            self.log.append("dropped")
            self.pair.zero_grad()
        else:
            self.pair.step()

    def flush(self) -> None:
        self.pair.flush()
        self.pair.assert_same_params()

    def read(self) -> None:
        copy.deepcopy(self.pair.opt.state_dict())
        self.pair.assert_same_params()
        with torch.no_grad():
            loss_of(copy.deepcopy(self.pair.model), 7)

    def refresh(self) -> None:
        self.pair.opt.refresh()

    def switch(self) -> None:
        self.policy = self.draw_policy()
        self.log.append(self.policy)
        self.pair.opt.switch_update(**self.policy)
        self.pair.plain.flush()
        self.pair.plain.delay_after = self.delay()

    def rates(self) -> None:
        group, lr = self.rng.randrange(2), self.rng.choice([1e-3, 1e-2, 3e-2])
        for _, opt in self.sides():
            opt.param_groups[group]["lr"] = lr

    def freeze(self) -> None:
        layer, value = self.rng.randrange(1, 3), self.rng.random() < 0.5
        self.log.append((layer, value))
        for model, opt in self.sides():
            model.layers[layer].bias.requires_grad_(value)
            opt.zero_grad()

    def edit(self) -> None:
        """Only what is not late may be written to."""
        self.pair.flush()
        self.pair.opt.synchronize()
        with torch.no_grad():
            for model, _ in self.sides():
                model.layers[1].weight[:5].mul_(0.5)
        state = self.pair.plain.state.get(self.pair.twin.layers[1].weight)
        value = self.pair.twin.layers[1].weight.detach().view(-1)
        changed = state["master"].to(value.dtype) != value
        state["master"][changed] = value[changed].float()

    def resume(self) -> None:
        """In another model and optimizer; the weights come first or last."""
        model, opt = self.pair.model, self.pair.opt
        self.policy = self.draw_policy() if self.rng.random() < 0.4 else self.policy
        model_first, trained = self.rng.random() < 0.5, self.rng.random() < 0.5
        self.log.append((self.policy, model_first, trained))
        weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
        frozen = [not p.requires_grad for p in model.parameters()]
        opt.close()
        options = {"bucket_bytes": self.rng.choice([1, 3000]), "max_grad_norm": self.max_grad_norm}
        self.pair.model, self.pair.opt = self.pair.offloaded(**options, **self.policy)
        for p, is_frozen in zip(self.pair.model.parameters(), frozen, strict=True):
            p.requires_grad_(not is_frozen)
        for step in range(3 if trained else 0):
            loss_of(self.pair.model, step).backward()
            self.pair.opt.step()
            self.pair.opt.zero_grad()
        loads = [lambda: self.pair.model.load_state_dict(weights), lambda: self.pair.opt.load_state_dict(saved)]
        for load in loads if model_first else reversed(loads):
            load()
        self.pair.plain.delay_after = self.delay()
        if "delayed" not in saved:  # skipped steps are not counted then
            self.pair.plain.steps = max((int(s["step"]) for s in self.pair.plain.state.values()), default=0)

    def run(self) -> None:
        between = [self.flush, self.read, self.refresh, self.switch, self.rates, self.freeze, self.edit, self.resume]
        for _ in range(10):
            while self.rng.random() < 0.4:
                what = self.rng.choice(between)
                self.log.append(what.__name__)
                what()
            self.step()
        self.step(may_drop=False)  # takes over what was written
        self.pair.assert_same()
        self.pair.close()


@pytest.mark.parametrize("seeds", [SEEDS], ids=str)
def test_random_delayed_runs(seeds):
    for seed in seeds:
        run = Run(seed)
        try:
            run.run()
        except Exception as error:
            error.add_note(f"seed {seed}: " + "\n  ".join(map(str, run.log)))
            raise
