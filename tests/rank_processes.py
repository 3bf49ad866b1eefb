"""Several gloo ranks on this machine, forked from this process, which has imported torch already."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Imported before the forks: each of them would spend seconds on it.
import zofftk.optimizer
import zofftk.ranks.many
import zofftk.sharding.saving  # noqa: F401

LIMIT_S = 60


def run_ranks(
    size: int, work: Callable[[int], Any], *, killed: tuple[int, ...] = (), limit_s: float = LIMIT_S
) -> list[Any]:
    """What `work(rank)` returns on each of `size` ranks; the ranks `killed` must end by a signal, and give None."""
    fork = multiprocessing.get_context("fork")
    with tempfile.NamedTemporaryFile() as meeting:
        pipes = [fork.Pipe(duplex=False) for _ in range(size)]
        processes = [fork.Process(target=_rank, args=(r, size, meeting.name, work, pipes[r][1])) for r in range(size)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork where there are threads
            for process in processes:
                process.start()
        for _, sending in pipes:
            sending.close()
        try:
            return _results(processes, [receiving for receiving, _ in pipes], killed, limit_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _results(processes: list[Any], pipes: list[Any], killed: tuple[int, ...], limit_s: float) -> list[Any]:
    results, faults, deadline = [], [], time.monotonic() + limit_s
    for rank, (process, pipe) in enumerate(zip(processes, pipes, strict=True)):
        result, fault = None, f"rank {rank} did not end within {limit_s} s"
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            try:
                result, fault = pickle.loads(pipe.recv_bytes())
            except EOFError:
                process.join()
                fault = None if rank in killed and process.exitcode < 0 else f"rank {rank} ended: {process.exitcode}"
        results.append(result)
        faults += [fault] if fault else []
    assert not faults, "\n".join(faults)
    return results


def _rank(rank: int, size: int, meeting: str, work: Callable[[int], Any], pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        store = dist.FileStore(meeting, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
        result = work(rank), None
    except BaseException:
        result = None, f"rank {rank}:\n{traceback.format_exc()}"
    # Not by `pipe.send`: torch would send tensors as files that this process would have to stay for.
    pipe.send_bytes(pickle.dumps(result))
    os._exit(0)
