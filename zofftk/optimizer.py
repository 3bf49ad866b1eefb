"""`OffloadOptimizer`: the engine behind the face of a torch optimizer."""

from __future__ import annotations

import dataclasses
import math
import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Any

import torch

from zofftk import carried, gradients, lateness, states
from zofftk.config import OffloadConfig
from zofftk.cpu_kernels import release_workers
from zofftk.deferred_interrupts import interrupts_deferred
from zofftk.device.opening import device_for
from zofftk.engine import Engine, Gathered, Managed
from zofftk.errors import StoppedError
from zofftk.gradient_access import GradientAccess
from zofftk.loss_scale import ScaleKeeper
from zofftk.mapped import FileMappings
from zofftk.memory_needs import warn_if_short
from zofftk.ownership import close_others
from zofftk.policies import kept_params
from zofftk.ranks import unlike
from zofftk.ranks.opening import check_later, check_ranks, open_ranks, open_tensor_parallel
from zofftk.replaced import Replacements
from zofftk.reporting import Reporting
from zofftk.rules.base import Hyper, Rule
from zofftk.stand_ins import StandIns
from zofftk.state_dict import blank_state, entries_of_others, groups_to_load, match_states, on_host
from zofftk.unfrozen import norm_check
from zofftk.validation import check_memory, check_param, parameter_name


class OffloadOptimizer(GradientAccess, Reporting, torch.optim.Optimizer):
    """An optimizer whose fp32 states live on the host, updated there by all cores: see `OffloadAdamW` and its sisters.

    Gradients leave the device while backward runs; `p.grad` then holds a stand-in that answers `clip_grad_norm_`,
    norms, scaling and `zero_grad`, and refuses with a sentence what needs the values (`grad(p)` reads them). The
    parameters stay where they are; each new value is the fp32 master rounded to the parameter's dtype. A step whose
    gradients are not all finite changes nothing and is counted in `skipped_steps`.

    Subclasses set `rule` and hand the hyper-parameters over in `defaults`.
    """

    rule: Rule

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        config: OffloadConfig | None,
        options: dict[str, Any],
    ) -> None:
        self._engine: Engine | None = None  # torch's constructor calls add_param_group before there can be one
        merged = OffloadConfig.merged(config, options)
        self.rule.check_group(defaults)
        super().__init__(params, defaults | self.rule.torch_group | carried.room(merged))
        self._managed: dict[int, Managed] = {}  # by id of the parameter
        self._replacements = Replacements(self._managed)
        self._steps = 0
        self._scale = ScaleKeeper(merged.loss_scale)
        self.rank_timeout_s = merged.rank_timeout_s  # counts also where ranks save and load
        self.last_step_skipped = False
        self.last_grad_norm: float | None = None
        self.overlaps: set[object] = set()  # see `offload`
        params = self._all_params()
        check_ranks(merged, params)
        device = merged.device or device_for(params, merged)
        with ExitStack() as opened:  # where ranks differ, or one is gone, nothing goes on here
            opened.callback(device.close)
            ranks = open_ranks(merged, device, params, type(self).__name__)
            opened.callback(ranks.close)
            ranks.check_norm = norm_check(self)
            if (tensor_parallel := open_tensor_parallel(merged, device, params, type(self).__name__)) is not None:
                opened.callback(tensor_parallel.close)
            engine = self._engine = Engine(merged, device, self.rule, ranks)
            engine.tensor_parallel = tensor_parallel
            engine.loss_scale = self._scale.value
            self._stand_ins = StandIns(engine)
            opened.callback(self.close)
            trained = [param for param in params if param.requires_grad]
            if ranks.rank == 0:
                warn_if_short(trained, merged, len(self._states_of(trained)), ranks=ranks.size)
            self._manage(trained)
            opened.pop_all()
        weakref.finalize(self, lateness.warn_if_kept, engine.policies, os.getpid())

    # -- parameters --------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.rule.check_group(group)
            for number, param in enumerate(group["params"]):
                check_param(param, parameter_name(group, len(self.param_groups) - 1, number))
            names = self._names()
            check_memory(self._all_params(), [names[id(param)] for param in self._all_params()])
            if self._engine is not None:
                check_later([p for other in self.param_groups[:-1] for p in other["params"]], group["params"])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if self._engine is not None:
            self._manage([param for param in group["params"] if param.requires_grad])

    def takes(self, param: torch.Tensor) -> bool:
        """Whether this optimizer takes the gradients of `param` now."""
        managed = self._managed.get(id(param))
        return self._engine is not None and managed is not None and managed.tensor is param

    def _all_params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _manage(self, params: list[torch.Tensor]) -> None:
        """Give `params` their place on the host, and the trainable ones their hook."""
        engine = self._require_engine()
        new = [param for param in params if id(param) not in self._managed]
        names = self._names() if new else {}
        for param in new:
            check_param(param, names[id(param)])
        close_others(self, new)
        for managed in engine.add(new, [names[id(param)] for param in new], self._states_of(new)):
            self._managed[id(managed.tensor)] = managed
            self._stand_ins.add(managed)
            if saved := self.state.pop(managed.tensor, None):  # loaded while the parameter was frozen
                states.load(engine, self.rule, managed, saved)
                states.publish(engine, self.rule, self.state, managed)
        for param in params:
            self._stand_ins.attach(self._managed[id(param)])

    def _states_of(self, params: list[torch.Tensor]) -> list[str]:
        """The moments that their groups ask for now."""
        asked, known = set[str](), {id(param) for param in params}
        for group in self.param_groups:
            if any(id(param) in known for param in group["params"]):
                asked.update(self.rule.hyper(group).states)
        return [state for state in self.rule.states if state in asked]

    def _names(self) -> dict[int, str]:
        return {
            id(param): parameter_name(group, number, i)
            for number, group in enumerate(self.param_groups)
            for i, param in enumerate(group["params"])
        }

    # -- the step ----------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient. Returns what `closure` returns."""
        engine = self._require_engine()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with interrupts_deferred():
            self._step(engine)
        return loss

    def _step(self, engine: Engine) -> None:
        engine.deliver()
        engine.land_all()
        self._replacements.check(engine)
        is_alone = engine.ranks.size == 1  # others may have a gradient of what was unfrozen where this one has none
        self._manage([p for p in self._all_params() if p.grad is not None or (p.requires_grad and not is_alone)])
        for managed in self._managed.values():
            self._stand_ins.collect(managed)
        if not (engine.managed and (not is_alone or any(m.gathered is Gathered.LIVE for m in engine.managed))):
            return
        for group in self.param_groups:
            self.rule.check_group(group)
        states.take_over_edits(engine, self.rule, self.state, at_step=True)
        if (norm := engine.step(self._hypers(engine), early=bool(self.overlaps))) is None:
            return  # no rank has a gradient
        self.last_grad_norm = norm
        self._steps += 1
        self.last_step_skipped = not math.isfinite(norm)
        if self.last_step_skipped:
            self._scale.after_skip(norm, gradients.not_finite(engine), stacklevel=6)  # the line that called step()
            for index in unlike.share_kept(engine):
                self._stand_ins.put(index)
        else:
            self._scale.after_step()
            states.publish_all(engine, self.rule, self.state)
        engine.change_loss_scale(self._scale.value)

    def adopt_replaced(self) -> None:
        """Go on with the parameters that stand in the modules now, in the place of those they replaced there.

        To be called right after `load_state_dict(assign=True)`, `module.weight = nn.Parameter(...)` and the like, which
        put other objects into the modules; the states go over to them. A parameter whose gradient has been gathered,
        or that another optimizer of this package holds, stays as it is.
        """
        for known, new in list(self._replacements.pending().items()):
            managed = self._managed[known]
            if managed.gathered is Gathered.LIVE or not new.requires_grad:
                continue  # the old one is still in use, or there is nothing to train
            managed.check(new)
            self._replacements.done(known)
            self._adopt(managed, new)

    def _adopt(self, managed: Managed, new: torch.Tensor) -> None:
        old = managed.tensor
        for group in self.param_groups:
            group["params"] = [new if param is old else param for param in group["params"]]
        if old in self.state:
            self.state[new] = self.state.pop(old)
        self._managed[id(new)] = self._managed.pop(id(old))
        self._stand_ins.move(managed, new)
        engine = self._require_engine()
        if not managed.is_loaded or managed.index not in kept_params(engine.policy):
            states.refresh(engine, managed)  # else the master is one update ahead of the weights that were loaded

    def _hypers(self, engine: Engine) -> dict[int, Hyper]:
        """Of every parameter, with room for the moments they ask for."""
        hypers: dict[int, Hyper] = {}
        for group in self.param_groups:
            hyper = self.rule.hyper(group)
            for param in group["params"]:
                if (managed := self._managed.get(id(param))) is not None:
                    managed.segment.have(engine.device, hyper.states)
                    hypers[managed.index] = hyper if managed.filled.issuperset(hyper.states) else hyper.first()
        return hypers

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, also what has been gathered of them; with False they become true zeros."""
        engine = self._require_engine()
        self._manage([param for param in self._all_params() if param.requires_grad])  # unfrozen since?
        if set_to_none:
            engine.deliver()
            for managed in engine.managed:
                if managed.gathered is Gathered.LIVE:
                    engine.forget(managed.index)
                    self._stand_ins.renew(managed.index)
                elif managed.gathered is Gathered.SPENT:
                    self._stand_ins.renew_if_kept(managed.index)
            engine.inside.land_all()  # of a backward that has failed
            engine.restart()
        with torch._C.DisableTorchFunctionSubclass():  # quicker where parameters are `pending`, whose values it leaves
            super().zero_grad(set_to_none)

    def land(self, params: Iterable[torch.Tensor]) -> None:
        """These are about to be read: compute goes on when their new values are there."""
        if self._engine is None or not self._engine.way_up.in_flight:
            return
        with interrupts_deferred():
            for param in params:
                if (managed := self._managed.get(id(param))) is not None:
                    self._engine.way_up.land(managed)

    def flush(self) -> None:
        """Send what a delayed update has left for the next step to the parameters now."""
        with interrupts_deferred():
            lateness.flush(self._require_engine())

    def switch_update(self, update: str, delay_after: int = 0) -> None:
        """Go on with another of the options `update` and `delay_after`, which counts from the first step of all."""
        dataclasses.replace(self._require_engine().config, update=update, delay_after=delay_after)  # checks them
        with interrupts_deferred():
            lateness.switch(self._require_engine(), update, delay_after)

    def synchronize(self) -> None:
        """Every parameter and every state holds the values of the last step, but for what is late: see `flush`."""
        engine = self._require_engine()
        with interrupts_deferred():
            engine.land_all()
            engine.finish()

    # -- the loss scale ----------------------------------------------------------------------------------------

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on, times the loss scale of this step."""
        self._manage([param for param in self._all_params() if param.requires_grad])  # unfrozen since?
        return loss * self._scale.value

    # -- what can be asked -------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take over weights that were written into the parameters without moving their version counter (`p.data`).

        While a delayed update is late, only what torch has seen is taken over, and drops that parameter's update; call
        `flush()` before writing otherwise.
        """
        late = kept_params((engine := self._require_engine()).policy)
        for managed in engine.managed:
            is_ahead = managed.index in late and (managed.is_loaded or not managed.is_edited)  # its master is
            if not is_ahead:
                states.refresh(engine, managed)

    def close(self) -> None:
        """Remove the hooks and end the engine's threads; the states stay readable. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            with suppress(StoppedError):  # the fault has been raised before; what was under way is lost
                lateness.flush(engine)
                engine.land_all()
        finally:
            self._release(engine)

    def _release(self, engine: Engine) -> None:
        self._stand_ins.release()
        try:
            engine.device.close()
        finally:
            engine.drop()
            release_workers()

    # -- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The format of torch's optimizer, with the fp32 parameters beside the moments under `master`.

        Beside `state` and `param_groups`, a dynamic loss scale is under `loss_scale`, what is late under `delayed`; in
        each group is a copy of both. The tensors are views of the host's memory: save or copy them before a step.
        """
        if self._engine is not None:
            self._engine.land_all()
            if all(managed.complaint(managed.tensor) is None for managed in self._engine.managed):
                # A master from before would undo what was written.
                states.take_over_edits(self._engine, self.rule, self.state, at_step=False)
                states.publish_all(self._engine, self.rule, self.state)
            self._engine.finish()
        saved = super().state_dict()
        saved["state"] = {key: dict(state) for key, state in saved["state"].items()}
        late = None if self._engine is None else lateness.state(self._engine, self._all_params())
        extras = {"loss_scale": self._scale.state(), "delayed": late}
        return carried.attach(saved, {key: value for key, value in extras.items() if value is not None})

    def show_states(self) -> dict[str, Any]:
        """`state_dict()` with a state for every parameter, also before the first step: what `load_sharded` fills."""
        engine = self._require_engine()
        for managed in engine.managed:
            managed.segment.have(engine.device, self._states_of([managed.tensor]))
            states.publish(engine, self.rule, self.state, managed, all_of=True)
        saved = self.state_dict()
        for number, param in enumerate(self._all_params()):
            if id(param) not in self._managed:  # frozen: whole, as `load_state_dict` keeps it for when it is trained
                saved["state"].setdefault(number, blank_state(param, self._states_of([param])))
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups and states; nothing changes unless all of it fits. Moments keep their fp32 bits.

        Args:
            state_dict: of this class or of torch's optimizer of its kind. Masters count where they round to the weights
                in the model, which may be loaded before or after. Entries of others in groups and states are kept.

        Raises:
            ValueError: other groups or shapes; an entry that is missing or no state; an option that is not offered.
            TypeError: a hyper-parameter that is no number.
            RuntimeError: the optimizer is closed.

        Source: `torch.optim.Optimizer.load_state_dict`, but for the cast to the parameter's dtype.
        """
        engine = self._require_engine()
        state_dict = carried.restored(state_dict)
        saved = match_states(state_dict, self.param_groups, self._names(), self.rule)
        engine.land_all()
        engine.finish()
        groups = groups_to_load(self.rule, state_dict["param_groups"], carried.room(engine.config))
        super().load_state_dict({"state": {}, "param_groups": groups})
        self._manage(lateness.trained_or_late(state_dict.get("delayed"), self._all_params()))
        files = FileMappings()
        for param in self._all_params():
            managed, state = self._managed.get(id(param)), saved.get(id(param))
            if managed is not None:
                states.load(engine, self.rule, managed, state, files)
                if state is not None:
                    self.state[param] = entries_of_others(self.rule, state)
                    states.publish(engine, self.rule, self.state, managed)
                else:
                    states.refresh(engine, managed, anew=True)  # it had no update: its weight is all there is
            elif state is not None:
                self.state[param] = on_host(state)  # kept for when it is trained
        files.release()
        self._scale.load(state_dict.get("loss_scale"))
        engine.change_loss_scale(self._scale.value)
        lateness.load(engine, state_dict.get("delayed"), self._all_params())
        states.publish_all(engine, self.rule, self.state)

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(f"{type(self).__name__} cannot be copied: it owns threads and memory; use its state_dict()")

    def __reduce__(self) -> Any:
        raise TypeError(f"{type(self).__name__} cannot be pickled: it owns threads and memory; use its state_dict()")
