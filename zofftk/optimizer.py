"""`OffloadAdamW`: the engine behind the face of a torch optimizer."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from zofftk.config import OffloadConfig
from zofftk.cpu_kernels import Hyper, release_workers
from zofftk.deferred_interrupts import interrupts_deferred
from zofftk.device.opening import device_for
from zofftk.engine import Engine, Gathered, Managed
from zofftk.host_views import finisher, load_state, views_of
from zofftk.loss_scale import ScaleKeeper
from zofftk.mapped import FileMappings
from zofftk.replaced import Replacements
from zofftk.report import StepReport, report_of
from zofftk.stand_ins import StandIns
from zofftk.state_dict import TORCH_GROUP, groups_to_load, match_states, on_host
from zofftk.trace import Trace
from zofftk.validation import check_gradient, check_hyper, check_memory, check_param, parameter_name

logger = logging.getLogger("zofftk")


class OffloadAdamW(torch.optim.Optimizer):
    """AdamW (decoupled weight decay) whose fp32 states live on the host, updated there by all cores.

    Gradients leave the device while backward runs; `p.grad` then holds a stand-in that answers `clip_grad_norm_`,
    norms, scaling and `zero_grad`, and refuses with a sentence what needs the values (`grad(p)` reads them). The
    parameters stay where they are; each new value is the fp32 master rounded to the parameter's dtype. A step whose
    gradients are not all finite changes nothing and is counted in `skipped_steps`.

    Args:
        params: tensors, (name, tensor) pairs, or dicts that define groups, as for any torch optimizer. fp32, bf16 or
            fp16, dense, real, on the CPU.
        lr: learning rate (a float or a 0-dim tensor).
        betas: decay rates of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, scaled by lr.
        config: the engine's options, see `OffloadConfig`.
        **options: the same options, as keywords; they go before `config`.

    Raises:
        TypeError: an option that does not exist; a parameter of another dtype or layout.
        ValueError: a value out of range; no parameters; parameters on an unsupported device.

    Source: ZeRO-Offload, sections 4.1 and 5.1; the update is that of `torch.optim.AdamW`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        config: OffloadConfig | None = None,
        **options: Any,
    ) -> None:
        self._engine: Engine | None = None  # torch's constructor calls add_param_group before there can be one
        merged = OffloadConfig.merged(config, options)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **TORCH_GROUP}
        check_hyper(defaults)
        super().__init__(params, defaults)
        self._managed: dict[int, Managed] = {}  # by id of the parameter
        self._replacements = Replacements(self._managed)
        self._loaded_at: dict[int, int] = {}  # versions of frozen parameters when their states were loaded, by id
        self._steps = 0
        self._scale = ScaleKeeper(merged.loss_scale)
        self.last_step_skipped = False
        self.last_grad_norm: float | None = None
        self.overlaps: set[object] = set()  # see `offload`
        device = merged.device or device_for(self._all_params(), merged)
        self._engine = Engine(merged, device)
        self._stand_ins = StandIns(self._engine)
        self._engine.loss_scale = self._scale.value
        self._manage([param for param in self._all_params() if param.requires_grad])

    # -- parameters --------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_hyper(group)
            for number, param in enumerate(group["params"]):
                check_param(param, parameter_name(group, len(self.param_groups) - 1, number))
            names = self._names()
            check_memory(self._all_params(), [names[id(param)] for param in self._all_params()])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if self._engine is not None:
            self._manage([param for param in group["params"] if param.requires_grad])

    def _all_params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _manage(self, params: list[torch.Tensor]) -> None:
        """Give `params` their place on the host, and the trainable ones their hook."""
        engine, names = self._require_engine(), self._names()
        new = [param for param in params if id(param) not in self._managed]
        for managed in engine.add(new, [names[id(param)] for param in new]):
            self._managed[id(managed.tensor)] = managed
            self._stand_ins.add(managed)
            if saved := self.state.pop(managed.tensor, None):  # loaded while the parameter was frozen
                load_state(managed, saved)
                managed.version = self._loaded_at.pop(id(managed.tensor), managed.version)  # written to since?
                self._publish_state(managed, saved)
        for param in params:
            self._stand_ins.attach(self._managed[id(param)])

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
        engine.way_up.land_all()
        self._adopt_replacements(engine)
        self._manage([param for param in self._all_params() if param.grad is not None])
        for managed in self._managed.values():
            self._stand_ins.collect(managed)
        if not any(managed.gathered is Gathered.LIVE for managed in engine.managed):
            return
        for managed in engine.managed:
            if managed.step and not self.state.get(managed.tensor):
                load_state(managed, None)  # the user has deleted it: it starts anew
        self._take_over_edits(engine)
        norm = engine.step(self._hypers(), early=bool(self.overlaps))
        self.last_grad_norm = norm
        self._steps += 1
        self.last_step_skipped = not math.isfinite(norm)
        if self.last_step_skipped:
            self._scale.after_skip(norm, engine.not_finite(), stacklevel=6)  # the line that called step()
        else:
            self._scale.after_step()
            self._publish_states(engine)
        engine.loss_scale = self._scale.value

    def _adopt_replacements(self, engine: Engine) -> None:
        """A parameter that has taken the place of one of ours in its module is ours from now on."""
        for known, new in list(self._replacements.pending().items()):
            managed = self._managed[known]
            if managed.gathered is Gathered.LIVE or not new.requires_grad:
                continue  # the old one is still in use, or there is nothing to train
            managed.check(new)
            logger.warning("%s is another object now, which the optimizer goes on with", managed.name)
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
        self._require_engine().refresh(managed.index)

    def _take_over_edits(self, engine: Engine) -> None:
        """What was written into parameters becomes their master; raises before anything where that is impossible."""
        edited = [managed for managed in engine.managed if managed.is_edited]
        for managed in edited:
            managed.check(managed.tensor)
        for managed in edited:
            engine.refresh(managed.index)

    def _hypers(self) -> dict[int, Hyper]:
        hypers: dict[int, Hyper] = {}
        for group in self.param_groups:
            beta1, beta2 = (float(beta) for beta in group["betas"])
            hyper = Hyper(float(group["lr"]), beta1, beta2, float(group["eps"]), float(group["weight_decay"]))
            for param in group["params"]:
                if (managed := self._managed.get(id(param))) is not None:
                    hypers[managed.index] = hyper
        return hypers

    def _publish_states(self, engine: Engine) -> None:
        """Show the host's states of updated parameters in `state`, as views."""
        for managed in engine.managed:
            if managed.step:
                self._publish_state(managed)

    def _publish_state(self, managed: Managed, loaded: dict[str, Any] | None = None) -> None:
        if not self.state.get(managed.tensor):
            self.state[managed.tensor] = views_of(managed, finisher(self._require_engine()), loaded)
        self.state[managed.tensor].count(managed.step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, also what has been gathered of them; with False they become true zeros."""
        if set_to_none:
            engine = self._require_engine()
            engine.deliver()
            for managed in engine.managed:
                if managed.gathered is Gathered.LIVE:
                    engine.forget(managed.index)
                    self._stand_ins.renew(managed.index)
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

    def synchronize(self) -> None:
        """Every parameter and every state holds the values of the last step."""
        engine = self._require_engine()
        with interrupts_deferred():
            engine.way_up.land_all()
            engine.finish()

    # -- the loss scale ----------------------------------------------------------------------------------------

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on, times the loss scale of this step."""
        return loss * self._scale.value

    @property
    def loss_scale(self) -> float:
        """The factor of the coming step; 1 where the option `loss_scale` was not given."""
        return self._scale.value

    @property
    def skipped_steps(self) -> int:
        """Steps so far whose gradients were not finite; they changed nothing."""
        return self._scale.skipped_steps

    # -- what can be asked -------------------------------------------------------------------------------------

    def grad(self, param: torch.Tensor) -> torch.Tensor | None:
        """A copy of the gradient gathered for the next step: fp32, on the host, in the parameter's shape."""
        managed = self._managed.get(id(param))
        if managed is None:
            raise ValueError("grad() expects a trainable parameter of this optimizer")
        (engine := self._require_engine()).deliver()
        if param.grad is not self._stand_ins[managed.index]:  # dropped, or put there by hand
            grad = param.grad
            return None if grad is None else grad.detach().to("cpu", torch.float32, copy=True) / self._scale.value
        return engine.gradient(managed.index) if managed.gathered is Gathered.LIVE else None

    def set_grad(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Have the next step use this gradient, in place of what was gathered; the counterpart of `grad`.

        Args:
            param: a trainable parameter of this optimizer.
            grad: of its shape, any real floating-point dtype, on any device; it keeps its precision on the way. Not
                scaled by a loss scale.
        """
        managed = self._managed.get(id(param))
        if managed is None:
            raise ValueError("set_grad() expects a trainable parameter of this optimizer")
        if grad.shape != managed.shape:
            raise ValueError(f"set_grad() expects a gradient of shape {tuple(managed.shape)}, got {tuple(grad.shape)}")
        check_gradient(grad, managed.name)
        engine = self._require_engine()
        engine.deliver()
        scale = self._scale.value
        own = grad.detach().clone() if scale == 1.0 else grad.detach().float() * scale
        engine.take(managed.index, own.to(managed.device))
        self._stand_ins.put(managed.index)

    def refresh(self) -> None:
        """Take over weights that were written into the parameters without moving their version counter (`p.data`)."""
        for managed in (engine := self._require_engine()).managed:
            engine.refresh(managed.index)

    def report(self) -> StepReport:
        """Sizes, bytes moved and where the time of the steps went, so far."""
        return report_of(self._require_engine(), self._steps)

    @property
    def trace(self) -> Trace:
        """What the streams did; a training loop may add its own spans, such as forward and backward."""
        return self._require_engine().device.trace

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the last 100,000 spans as a Chrome trace; needs the option `trace=True`."""
        if not self.trace.keep_spans:
            raise ValueError("write_trace needs the optimizer to be built with trace=True")
        self._require_engine().device.collect_spans()
        self.trace.write(path)

    def close(self) -> None:
        """Remove the hooks and end the engine's threads; the states stay readable. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            engine.way_up.land_all()
        finally:
            self._release(engine)

    def _release(self, engine: Engine) -> None:
        self._stand_ins.release()
        try:
            engine.device.close()
        finally:
            engine.way_up.drop()
            release_workers()

    def _require_engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("this optimizer is closed")
        return self._engine

    # -- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """`torch.optim.AdamW`'s format, with the fp32 parameters beside the moments under `master`.

        `master_step` is a master's step: if another optimizer has gone on with the state, it is behind `step`, and
        loading takes the masters from the parameters. A dynamic loss scale is under `loss_scale`, beside `state`.
        The tensors are views of the host's memory: save or copy them before the next step.
        """
        if self._engine is not None:
            for managed in self._engine.managed:  # a master from before would undo what was written
                if managed.is_edited and managed.complaint(managed.tensor) is None:
                    self._engine.refresh(managed.index)
            self._engine.finish()
        saved = super().state_dict()
        saved["state"] = {key: dict(state) for key, state in saved["state"].items()}
        if (scale := self._scale.state()) is not None:
            saved["loss_scale"] = scale
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups and states; nothing changes unless all of it fits. Moments keep their fp32 bits.

        Args:
            state_dict: of this class or of `torch.optim.AdamW`. A state without masters leaves them as they are: the
                parameters' values. Entries of others in groups and states are kept.

        Raises:
            ValueError: other groups or shapes; an entry that is missing or no state; amsgrad or maximize.
            TypeError: a hyper-parameter that is no number.
            RuntimeError: the optimizer is closed.

        Source: `torch.optim.Optimizer.load_state_dict`, but for the cast to the parameter's dtype.
        """
        engine = self._require_engine()
        saved = match_states(state_dict, self.param_groups, self._names())
        engine.way_up.land_all()
        engine.finish()
        super().load_state_dict({"state": {}, "param_groups": groups_to_load(state_dict["param_groups"])})
        self._manage([param for param in self._all_params() if param.requires_grad])
        files = FileMappings()
        for param in self._all_params():
            managed, state = self._managed.get(id(param)), saved.get(id(param))
            if managed is not None:
                load_state(managed, state, files)
                if state is not None:
                    self._publish_state(managed, state)
                    if "master" not in state and managed.complaint(managed.tensor) is None:
                        engine.refresh(managed.index)
            elif state is not None:
                self.state[param] = on_host(state)  # kept for when it is trained
                self._loaded_at[id(param)] = param._version
        files.release()
        self._scale.load(state_dict.get("loss_scale"))
        engine.loss_scale = self._scale.value

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(f"{type(self).__name__} cannot be copied: it owns threads and memory; use its state_dict()")

    def __reduce__(self) -> Any:
        raise TypeError(f"{type(self).__name__} cannot be pickled: it owns threads and memory; use its state_dict()")
