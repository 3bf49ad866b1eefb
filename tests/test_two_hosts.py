"""Two ranks with an address each, as on two hosts: in network namespaces that the test makes and removes."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launched import start

NETNS = 0x40000000  # CLONE_NEWNET of linux/sched.h
NAMES = tuple(f"zofftk-{os.getpid()}-{end}" for end in "ab")
ADDRESSES = ("10.213.7.1", "10.213.7.2")  # inside these namespaces alone


def ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts():
    """The names of two namespaces with a link between them."""
    if os.geteuid() != 0:
        pytest.skip("making a network namespace needs root")
    if shutil.which("ip") is None:
        pytest.skip("making a network namespace needs the program ip")
    with ExitStack() as made:
        try:
            for name in NAMES:
                ip("netns", "add", name)
                made.callback(ip, "netns", "delete", name)  # and with it its end of the link
            ip("-n", NAMES[0], "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", NAMES[1])
            for name, address in zip(NAMES, ADDRESSES, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", "link0")
                ip("-n", name, "link", "set", "link0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield NAMES


def test_two_hosts_train_as_one(hosts, tmp_path):
    def move(rank):
        with open(f"/run/netns/{hosts[rank]}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NETNS):
                raise OSError(ctypes.get_errno(), "setns")
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")

    text = tmp_path / "text.py"
    text.write_text("".join(f"def f{i}(x):\n    return x * {i}\n\n" for i in range(200)))
    variables = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "link0"}
    losses = []
    for size in (2, 1):
        options = ("--steps", 5, "--seq-len", 16, "--dtype", "fp32", "--data", text, "--out", tmp_path, "--name", size)
        enter = move if size == 2 else lambda rank: None
        started = start(size, tmp_path / "said", *options, "--rank-timeout", 60, variables=variables, enter=enter)
        assert started.wait() == [0] * size, started.all_say()
        record = json.loads(Path(tmp_path, str(size), "record.json").read_text())
        losses.append([sample["loss"] for sample in record["samples"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
