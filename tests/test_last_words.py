"""A process that ends, and does not die: what the others hear of it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.launched import free_port

SCRIPT = """
    import os, sys, torch, torch.distributed as dist, zofftk
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 8)
    opt = zofftk.OffloadAdamW(model.parameters(), lr=1e-3, rank_timeout_s=20)
    for step in range(4):
        if step == 2 and rank == {who}:
            {how}
        model(torch.ones(2, 8)).sum().backward()
        opt.step()
        opt.zero_grad()
    """


@pytest.mark.parametrize(
    ("who", "how", "says"),
    [
        (1, "raise KeyError('a name')", "rank 1 has ended with KeyError: 'a name' ("),
        (0, "raise ValueError('of rank 0')", "rank 0 has ended with ValueError: of rank 0 ("),
        pytest.param(
            *(1, "sys.exit(3)", "rank 1 has ended without closing its optimizer, after "), marks=pytest.mark.slow
        ),
    ],
)
def test_the_others_say_why_it_has_ended(who, how, says):
    script, port = textwrap.dedent(SCRIPT).format(who=who, how=how), free_port()
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script], env={**common, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert f"RankError: rank {1 - who} cannot go on at" in said[1 - who]
    assert says in said[1 - who]
