"""The gradients that an optimizer has gathered, for those who want to read or to replace them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zofftk import gradients
from zofftk.managed import Gathered, Managed
from zofftk.ranks.slices import from_slice
from zofftk.validation import check_gradient

if TYPE_CHECKING:
    from zofftk.engine import Engine
    from zofftk.loss_scale import ScaleKeeper
    from zofftk.stand_ins import StandIns


class GradientAccess:
    """The part of an optimizer that `grad` and `set_grad` are of."""

    if TYPE_CHECKING:
        _managed: dict[int, Managed]
        _scale: ScaleKeeper
        _stand_ins: StandIns

        def _require_engine(self) -> Engine: ...
        def _all_params(self) -> list[torch.Tensor]: ...
        def _manage(self, params: list[torch.Tensor]) -> None: ...

    def grad(self, param: torch.Tensor) -> torch.Tensor | None:
        """A copy of the gradient gathered for the next step: fp32, on the host, in the parameter's shape.

        Of a DTensor, a DTensor of its placement, on its mesh. Over several ranks, all of them call it.
        """
        managed = self._managed_of(param, "grad")
        (engine := self._require_engine()).deliver()
        grad = param.grad
        if grad is self._stand_ins[managed.index]:
            if managed.gathered is not Gathered.LIVE:
                return None
            return from_slice(param, gradients.read(engine, managed))
        if grad is None:  # dropped
            return None
        own = managed.to_slice(grad).detach().to("cpu", torch.float32, copy=True)  # put there by hand
        return from_slice(param, own.div_(self._scale.value))

    def set_grad(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Have the next step use this gradient, in place of what was gathered; the counterpart of `grad`.

        Args:
            param: a trainable parameter of this optimizer.
            grad: of its shape, any real floating-point dtype, on any device; it keeps its precision on the way. Not
                scaled by a loss scale. For a DTensor, a DTensor on the same mesh: where its placement is not the
                parameter's, it is brought there, and all ranks of the mesh call this.
        """
        managed = self._managed_of(param, "set_grad")
        if grad.shape != managed.shape:
            raise ValueError(f"set_grad() expects a gradient of shape {tuple(managed.shape)}, got {tuple(grad.shape)}")
        check_gradient(grad, managed.name)
        own = managed.to_slice(grad.detach())
        engine = self._require_engine()
        engine.deliver()
        scale = self._scale.value
        own = own.clone() if scale == 1.0 else own.float() * scale
        engine.take(managed.index, own.to(managed.device))
        self._stand_ins.put(managed.index)

    def _managed_of(self, param: torch.Tensor, method: str) -> Managed:
        if id(param) not in self._managed and param.requires_grad:
            self._manage([own for own in self._all_params() if own is param])  # unfrozen since?
        if (managed := self._managed.get(id(param))) is None:
            raise ValueError(f"{method}() expects a trainable parameter of this optimizer")
        return managed
