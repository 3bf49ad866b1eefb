"""Prints how many bytes a parameter saving and loading took at their peaks, beside what was there before.

Each in a fork, which has the imports.
"""

import os
import sys

import torch

import zofftk
from zofftk.process_memory import forget_peak, peak_bytes, resident_bytes


def build(count: int, numel: int):
    params = torch.nn.ParameterList(torch.full((numel,), 0.5, dtype=torch.bfloat16) for _ in range(count))
    return params, zofftk.OffloadAdamW(params.parameters(), lr=0.1)


def main(path: str, what: str, count: int, numel: int) -> None:
    params, opt = build(count, numel)
    if what == "save":
        for param in params:
            param.grad = torch.full_like(param, 0.25)
        opt.step()
        opt.zero_grad()
    else:
        zofftk.save(path + ".warm", {"state": opt.state_dict()})  # what is imported for it
        zofftk.load(path + ".warm")
    assert forget_peak()
    before = resident_bytes()
    if what == "save":
        zofftk.save(path, {"model": params.state_dict(), "optimizer": opt.state_dict()})
    else:
        content = zofftk.load(path)
        opt.load_state_dict(content["optimizer"])
        params.load_state_dict(content["model"])
        assert {state["exp_avg"].device.type for state in opt.state.values()} == {"cpu"}
    print((peak_bytes() - before) / (count * numel))


def in_a_fork(*arguments) -> None:
    if (pid := os.fork()) == 0:
        main(*arguments)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    for what in ("save", "load"):
        in_a_fork(sys.argv[1], what, int(sys.argv[2]), int(sys.argv[3]))
