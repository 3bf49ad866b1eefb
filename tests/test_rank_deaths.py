"""Ranks of `zofftk train` that are killed, at any moment: the others end, say who, and the last checkpoint loads."""

from __future__ import annotations

import os
import random
import re
import signal
import time

import pytest
import torch

from tests.launched import await_checkpoint, start
from zofftk.launch import Launch
from zofftk.rank_checkpoint import load_rank_checkpoint
from zofftk.train import prepare
from zofftk.train_config import TrainConfig

TIMEOUT_S = 10
MARGIN_S = 5


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text("".join(f"def f{i}(x):\n    return x * {i}\n\n" for i in range(200)))
    return path


def a_killed_rank(text, folder, turn, moments):
    """One run, of which one rank is killed at a random moment; every step of it saves over the same folder."""
    size, saved = moments.choice((2, 3)), folder / "checkpoint"
    options = ("--batch-size", 6, "--seq-len", 8, "--steps", 100_000, "--rank-timeout", TIMEOUT_S, "--save-every", 1)
    where = ("--data", text, "--out", folder, "--name", f"run-{turn}", "--save", saved)
    before = (saved / ".metadata").stat().st_mtime_ns if saved.exists() else 0
    started, killed = start(size, folder / "said", *options, *where), moments.randrange(size)
    if turn % 4 == 3:  # while the ranks meet, or build
        time.sleep(moments.random())
    else:
        await_checkpoint(saved, started, before)
        time.sleep(moments.random() * 0.3)
    began = time.monotonic()
    os.kill(started.processes[killed].pid, signal.SIGKILL)
    codes = started.wait(TIMEOUT_S + MARGIN_S)
    took = time.monotonic() - began
    assert codes.pop(killed) == -signal.SIGKILL
    assert all(code == 1 for code in codes), (size, killed, took, codes, started.all_say())
    for rank in set(range(size)) - {killed}:
        # Rank 0 has the store that the ranks meet at.
        gone = (
            rf"rank {killed} has (died|never begun)" if killed else r"rank 0 has (died|never begun)|\(?rank 0, or the"
        )
        assert re.search(gone, started.says(rank)), (size, killed, rank, took, started.says(rank))
    if saved.exists():
        checkpoint = load_rank_checkpoint(saved)
        assert checkpoint.step == len(checkpoint.samples) >= 1
        prepare(TrainConfig(**checkpoint.config), checkpoint, torch.device("cpu"), Launch()).optimizer.close()


def test_b10_a_killed_rank_ends_all_and_leaves_a_whole_checkpoint(text, tmp_path):
    moments = random.Random(0)
    for turn in (0, 1, 3):
        a_killed_rank(text, tmp_path, turn, moments)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_b10_twenty_killed_ranks(text, tmp_path):
    moments = random.Random(1)
    for turn in range(20):
        a_killed_rank(text, tmp_path, turn, moments)


def test_a_rank_that_hangs_is_waited_for_so_long(text, tmp_path):
    options = ("--batch-size", 6, "--seq-len", 8, "--steps", 100_000, "--rank-timeout", 4, "--save-every", 1)
    started = start(3, tmp_path / "said", *options, "--data", text, "--out", tmp_path, "--name", "run")
    await_checkpoint(tmp_path / "run" / "checkpoint", started)
    os.kill(started.processes[1].pid, signal.SIGSTOP)
    codes = started.wait(4 + MARGIN_S)
    assert codes[0] == codes[2] == 1, (codes, started.all_say())
    assert all("rank 1 has died or cannot be reached" in started.says(rank) for rank in (0, 2)), started.all_say()
