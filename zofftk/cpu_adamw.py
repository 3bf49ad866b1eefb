"""``torch.optim.AdamW`` for parameters on the CPU, by the compiled kernel."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from zofftk.adamw_state import checked_states
from zofftk.cpu_adam import adamw_step, check_hyperparameters
from zofftk.cpu_arguments import DTYPE_NAMES, check_threads
from zofftk.memory_overlap import Place, overlapping, overlaps_itself

# Options of torch.optim.AdamW that must keep their default here, and stay in the groups so that state dicts fit both.
_FIXED = {"amsgrad": False, "capturable": False, "differentiable": False, "decoupled_weight_decay": True}


class CPUAdamW(torch.optim.Optimizer):
    """AdamW for CPU parameters: the arguments, formula and state of ``torch.optim.AdamW``, one pass over memory.

    float32 parameters are updated in place. For bfloat16 and float16 parameters a float32 master lives in
    ``state[p]["master"]``: it takes the update, and the parameter becomes its rounded copy. The master is taken from
    the parameter at its first step; who overwrites such a parameter later deletes ``state[p]["master"]`` as well.
    Gradients may be float32, bfloat16 or float16.

    State of each parameter: ``step`` (float32, 0-dim, CPU), ``exp_avg`` and ``exp_avg_sq`` (float32, also for 16-bit
    parameters), ``master`` (16-bit parameters only). For float32 parameters the state dict goes both ways with
    ``torch.optim.AdamW``.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as in ``torch.optim.AdamW``; lr may be a 0-dim tensor.
        amsgrad, capturable, differentiable: accepted as False only.
        foreach, fused: ignored; there is one implementation.
        threads: upper bound of threads; default ``zofftk.threads.usable_threads()``.

    Raises:
        ValueError: a number out of range, an unsupported option, or (in ``step``, before anything changes) a parameter
            or gradient that is not a dense floating-point CPU tensor, or a parameter that shares memory with itself,
            another parameter or a gradient.
        TypeError: something that is not a number where one belongs.
    """

    threads: int | None = None  # on the class too: copies and unpickled optimizers carry groups and state only

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        threads: int | None = None,
    ) -> None:
        if threads is not None:
            threads = check_threads(threads)
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize)
        defaults |= dict(amsgrad=amsgrad, capturable=capturable, differentiable=differentiable)
        defaults |= dict(foreach=foreach, fused=fused, decoupled_weight_decay=True)
        _check_group(defaults)
        super().__init__(params, defaults)
        self.threads = threads

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_all()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of ``torch.optim.AdamW``.

        Moments and masters stay or become float32 whatever the parameter's dtype; ``step`` may be a number or a
        tensor of any dtype. What does not fit raises ValueError or TypeError, and nothing has changed then.
        """
        states: dict[torch.Tensor, dict[str, Any]] = {}

        def look(_: torch.optim.Optimizer, seen: dict[str, Any]) -> None:
            states.update(checked_states(seen, self.param_groups))
            for group in seen["param_groups"]:
                _check_group(group)

        # Registered last, it sees what other hooks made of the dict, before torch casts it to the parameter's dtype.
        handle = self.register_load_state_dict_pre_hook(look)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        self.state.update(states)

    def _check_all(self) -> None:
        places = []
        for number, group in enumerate(self.param_groups):
            _check_group(group)
            names = group.get("param_names")
            for index, param in enumerate(group["params"]):
                name = names[index] if names else f"parameter {index} of group {number}"
                if param.grad is not None:
                    _check_pair(name, param, param.grad)
                    places.append(Place(f"gradient of {name}", param.grad, written=False))
                if _has_memory(param):
                    places.append(Place(name, param, written=True))
        if (both := overlapping(places)) is not None:
            raise ValueError(f"{both[0].name} and {both[1].name}: expected memory of their own, they share some")

    def _state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
        if param.dtype != torch.float32 and "master" not in state:
            state["master"] = param.detach().to(torch.float32, memory_format=torch.preserve_format)
        return state

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self._state_of(param)
        is_narrow = param.dtype != torch.float32
        grad = grad.resolve_neg()
        tensors = [state["master"] if is_narrow else param, state["exp_avg"], state["exp_avg_sq"], grad]
        if is_narrow:
            tensors.append(param)
        flat = _flat_in_step(tensors)
        step = int(state["step"].item()) + 1
        adamw_step(
            *flat[:4],
            out=flat[4] if is_narrow else None,
            step=step,
            lr=float(group["lr"]),
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            grad_scale=-1.0 if group.get("maximize", False) else 1.0,
            threads=self.threads,
        )
        for tensor, updated in zip(tensors, flat, strict=True):
            if tensor is not grad and updated.data_ptr() != tensor.data_ptr():
                tensor.copy_(updated.view(tensor.shape))
        state["step"].fill_(step)


def _check_group(group: dict[str, Any]) -> None:
    check_hyperparameters(group["lr"], group["betas"], group["eps"], group["weight_decay"])
    for name, supported in _FIXED.items():
        if bool(group.get(name, supported)) != supported:
            raise ValueError(f"{name}: CPUAdamW supports {supported} only, got {group[name]}")


def _check_pair(name: str, param: torch.Tensor, grad: torch.Tensor) -> None:
    for what, tensor in ((name, param), (f"gradient of {name}", grad)):
        if tensor.device.type != "cpu":
            raise ValueError(f"{what}: expected a tensor on device cpu, got device {tensor.device}")
        if tensor.layout != torch.strided:
            raise ValueError(f"{what}: expected a dense tensor, got layout {tensor.layout}")
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"{what}: expected float32, bfloat16 or float16, got {tensor.dtype}")
        if tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0:
            raise ValueError(f"{what}: expected values, its storage has been freed")
    if grad.shape != param.shape:
        raise ValueError(f"gradient of {name}: expected shape {tuple(param.shape)}, got {tuple(grad.shape)}")
    if param.is_neg():
        raise ValueError(f"{name}: expected a tensor of plain values, got a lazily negated view")
    if overlaps_itself(param):
        raise ValueError(f"{name}: expected elements of its own, got strides {param.stride()} that share some")


def _has_memory(param: torch.Tensor) -> bool:
    on_cpu = param.device.type == "cpu" and param.layout == torch.strided
    return on_cpu and param.untyped_storage().nbytes() > 0


def _flat_in_step(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """One-dimensional, contiguous versions in which equal places belong together: views where the layouts allow it,
    copies in row-major order else (whose update the caller must copy back)."""
    first = tensors[0]
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    permuted = [tensor.detach().permute(order) for tensor in tensors]
    if all(tensor.is_contiguous() for tensor in permuted):
        return [tensor.view(-1) for tensor in permuted]
    return [tensor.detach().contiguous().view(-1) for tensor in tensors]
