"""Training steps of one preset with one optimizer, in a process of its own: `gpu_steps SIDE PRESET STEPS DEVICE`."""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zofftk.gpt import build_gpt
from zofftk.presets import find_preset

BATCH = 4


def main() -> int:
    side, preset_name, count, device_name = sys.argv[1:5]
    preset, device = find_preset(preset_name), torch.device(device_name)
    model = build_gpt(preset.model, seed=0, dtype=torch.bfloat16, device=device)
    step, finish = SIDES[side](model)
    ids = torch.randint(0, preset.model.vocab, (BATCH, preset.model.seq + 1), device=device)
    seconds = []
    for _ in range(int(count) + 1):
        began = time.perf_counter()
        step(lambda: model(ids[:, :-1], ids[:, 1:]))
        finish()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    params = sum(p.numel() for p in model.parameters())
    peak = torch.cuda.max_memory_allocated(device) / params if device.type == "cuda" else float("nan")
    print(f"median step {statistics.median(seconds[1:]):.3f} s, peak device bytes per parameter {peak:.2f}")
    return 0


def zofftk_side(model: nn.Module) -> tuple[Callable[[Callable[[], torch.Tensor]], None], Callable[[], None]]:
    import zofftk

    opt = zofftk.OffloadAdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0, trace=True)

    def step(loss: Callable[[], torch.Tensor]) -> None:
        loss().backward()
        opt.step()
        opt.zero_grad()

    def finish() -> None:
        opt.synchronize()
        opt.write_trace(Path("runs") / f"gpu_check_{sum(p.numel() for p in model.parameters())}.json")

    Path("runs").mkdir(exist_ok=True)
    return step, finish


def torchao_side(model: nn.Module) -> tuple[Callable[[Callable[[], torch.Tensor]], None], Callable[[], None]]:
    from torchao.optim import CPUOffloadOptimizer  # pyright: ignore[reportMissingImports]

    opt = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, lr=1e-4)

    def step(loss: Callable[[], torch.Tensor]) -> None:
        loss().backward()
        opt.step()
        opt.zero_grad()

    return step, lambda: None


def deepspeed_side(model: nn.Module) -> tuple[Callable[[Callable[[], torch.Tensor]], None], Callable[[], None]]:
    import deepspeed  # pyright: ignore[reportMissingImports]

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)  # pyright: ignore

    def step(loss: Callable[[], torch.Tensor]) -> None:
        engine.backward(loss())
        engine.step()

    return step, lambda: None


SIDES = {"zofftk": zofftk_side, "torchao": torchao_side, "deepspeed": deepspeed_side}

if __name__ == "__main__":
    raise SystemExit(main())
