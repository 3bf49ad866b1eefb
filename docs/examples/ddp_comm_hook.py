"""A communication hook for DistributedDataParallel: fp32 gradients travel as bfloat16, half the bytes.

`pack` casts a bucket to the wire's dtype and takes its sums of squares in the same pass, so the hook also knows
whether this rank's gradients are finite before they are mixed with the others'. `copy_back` widens the average into
the bucket. On GPUs both are Triton kernels; here two processes train over gloo on the CPU, in eager torch.
"""

# No `from __future__ import annotations`: DDP looks at the hook's annotations and takes no strings.

import os
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from zofftk.triton_kernels import Range, copy_back, count_blocks, pack

WORLD_SIZE = 2
TIMEOUT_S = 120


class BFloat16Wire:
    """The hook's state: the flag of this rank, raised by the first gradient that is not finite."""

    def __init__(self, device: torch.device) -> None:
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        grads = bucket.buffer()
        whole = [Range(grads, 0, grads.numel(), 0)]
        wire = torch.empty(grads.numel(), dtype=torch.bfloat16, device=grads.device)
        square_sums = torch.empty(count_blocks(grads.numel()), dtype=torch.float64, device=grads.device)
        pack(whole, wire, square_sums, self.flag)
        wire /= dist.get_world_size()
        arrival = dist.all_reduce(wire, async_op=True).get_future()

        def widen(_: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            copy_back(wire, whole)
            return grads

        return arrival.then(widen)


def worker(rank: int, rendezvous: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=60)
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Linear(256, 1)))
    wire = BFloat16Wire(torch.device("cpu"))
    model.register_comm_hook(wire, BFloat16Wire.hook)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)  # every rank has data of its own
    inputs = torch.randn(64, 32)
    for step in range(10):
        loss = (model(inputs) - inputs[:, :1]).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        if rank == 0 and step in (0, 9):
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    everyone = [torch.empty_like(flat) for _ in range(WORLD_SIZE)]
    dist.all_gather(everyone, flat)
    if rank == 0:
        print(f"finite: {not wire.flag.item()}, equal on all ranks: {torch.equal(*everyone)}", flush=True)
    dist.destroy_process_group()
    # DDP keeps gloo's threads to the end of the process, and torch aborts one whose interpreter ends before a thread
    # has let go of the tensors of its last collective.
    os._exit(0)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(worker, args=(os.path.join(folder, "rendezvous"),), nprocs=WORLD_SIZE, join=False)
        deadline_s = time.monotonic() + TIMEOUT_S
        try:
            while not context.join(timeout=1):
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"the workers took more than {TIMEOUT_S} s")
        finally:
            for process in context.processes:
                process.kill()


if __name__ == "__main__":
    main()
