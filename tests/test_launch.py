"""`zofftk train` over ranks: the losses of one rank, one checkpoint for any number of them, and one clear end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from io import StringIO

import pytest
from rich.console import Console

import zofftk.train
from tests.launched import await_checkpoint, start
from zofftk.errors import InputError
from zofftk.launch import Launch, check_options
from zofftk.outputs import Outputs
from zofftk.rank_checkpoint import load_rank_checkpoint
from zofftk.train import check_run, train
from zofftk.train_config import TrainConfig

SMALL = ("--seq-len", 16, "--dtype", "fp32", "--batch-size", 12)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text("".join(f"def f{i}(x):\n    return x * {i}\n\n" for i in range(200)))
    return path


@pytest.fixture
def run(text, tmp_path):
    """A run of so many ranks to its end; its losses."""

    def run_ranks(size, name, *arguments, **options):
        where = ("--data", text, "--out", tmp_path, "--name", name)
        started = start(size, tmp_path / "said", *SMALL, *where, *arguments, **options)
        codes = started.wait()
        assert codes == [0] * size, started.all_say()
        assert all(started.says(rank) == "" for rank in range(1, size))
        return losses(tmp_path / name)

    return run_ranks


def losses(folder):
    return [sample["loss"] for sample in json.loads((folder / "record.json").read_text())["samples"]]


@pytest.mark.parametrize(
    "tried",
    [[(4, 1)], [(2, 2)], pytest.param([(4, 2), (2, 1), (3, 1), (4, 4)], marks=pytest.mark.slow)],
    ids=str,
)
def test_the_losses_are_those_of_one_rank(run, tried):
    one = run(1, "one", "--steps", 20)
    for size, tp in tried:
        assert run(size, f"{size}-{tp}", "--steps", 20, "--tp", tp) == pytest.approx(one, rel=1e-5), (size, tp)


def test_ctrl_c_on_one_rank_stops_all_after_one_step_and_any_number_goes_on(run, text, tmp_path):
    late = ("--update", "delayed", "--delay-after", 1)
    whole = run(2, "whole", "--steps", 60, *late)
    where = ("--data", text, "--out", tmp_path, "--name", "cut", "--save-every", 2)
    started = start(2, tmp_path / "said", *SMALL, *where, "--steps", 60, *late)
    saved = tmp_path / "cut" / "checkpoint"
    await_checkpoint(saved, started)
    os.kill(started.processes[1].pid, signal.SIGINT)
    assert started.wait() == [130, 130], started.all_say()
    checkpoint = load_rank_checkpoint(saved)
    assert 2 <= checkpoint.step == len(checkpoint.samples) < 60
    assert f"Stopped after step {checkpoint.step} of 60" in started.says(0)
    assert f"torchrun ... -m zofftk train --resume {saved}" in started.says(0)
    assert started.says(1) == ""
    assert run(2, "again", "--resume", saved) == whole
    assert run(3, "three", "--resume", saved) == pytest.approx(whole, rel=1e-5)
    alone = train(
        TrainConfig(**checkpoint.config), Outputs(folder=tmp_path / "alone"), resume=checkpoint, console=silent()
    )
    assert alone == 0
    assert losses(tmp_path / "alone") == pytest.approx(whole, rel=1e-5)


def silent():
    return Console(file=StringIO())


def test_a_file_of_one_rank_is_gone_on_with_by_two(run, tmp_path):
    whole = run(1, "whole", "--steps", 6, "--save", tmp_path / "end.pt")
    more = run(1, "one", "--resume", tmp_path / "end.pt", "--steps", 9)
    for tp in (1, 2):
        resumed = run(2, f"of {tp}", "--resume", tmp_path / "end.pt", "--steps", 9, "--tp", tp)
        assert resumed == pytest.approx(more, rel=1e-5), tp
    assert more[:6] == whole


@pytest.mark.parametrize(
    "resumed_on", [[(4, 2), (1, 1), (4, 1)], pytest.param([(4, 4), (2, 2)], marks=pytest.mark.slow)], ids=str
)
def test_what_ranks_with_slices_have_saved_is_gone_on_with_in_any_layout(run, tmp_path, resumed_on):
    """Of 2 x 2 ranks: the same layout goes on with the same bits, another one adds in another order."""
    saved = tmp_path / "after 4"

    def keep_the_first_save(rank):
        save_run = zofftk.train.save_run
        zofftk.train.save_run = lambda path, training: save_run(saved if training.step == 4 else path, training)

    options = ("--steps", 10, "--save-every", 4, "--update", "delayed", "--delay-after", 1)
    whole = run(4, "whole", "--tp", 2, *options, enter=keep_the_first_save)
    assert load_rank_checkpoint(saved).step == 4
    for size, tp in resumed_on:
        resumed = run(size, f"{size}-{tp}", "--resume", saved, "--tp", tp)
        tolerance = 0 if (size, tp) == (4, 2) else 1e-5
        assert resumed == pytest.approx(whole, rel=tolerance, abs=0), (size, tp)


def placed(**options):
    launch = Launch()
    vars(launch).update(options)
    return launch


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        ({"dp": 3}, {"batch_size": 4}, "--batch-size: expected a multiple of 3, one part for each .*, got 4"),
        ({"tp": 3}, {}, "--tp: expected a divisor of the 4 heads, got 3"),
        ({"tp": 2}, {"seq_len": 33}, "--tp: expected a divisor of the 33 tokens, got 2"),
    ],
)
def test_what_does_not_divide_is_refused(text, ranks, options, message):
    config = TrainConfig.from_options({"data": (str(text),), "device": "cpu"} | options)
    with pytest.raises(InputError, match=message):
        check_run(config, None, placed(**ranks))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((4, 3, None), "--tp: expected a divisor of the number of ranks, which is 4, got 3"),
        ((1, 2, None), "--tp: expected a divisor of the number of ranks, which is 1, got 2"),
        ((2, 0, None), "--tp: .* got 0"),
        ((2, 1, 0.0), "--rank-timeout: expected a number of seconds above 0, got 0.0"),
        ((2, 1, float("nan")), "--rank-timeout"),
    ],
)
def test_options_of_many_ranks_are_checked(options, message):
    with pytest.raises(InputError, match=message):
        check_options(*options)


def test_a_refusal_is_said_once_and_ends_all(text, tmp_path):
    (tmp_path / "taken").mkdir()
    refused = {
        "--tp: expected a divisor of the number of ranks": ("--tp", 3),
        "--batch-size: expected a multiple of 2": ("--batch-size", 3),
        "--save: expected a checkpoint's folder or nothing": ("--save", tmp_path / "taken"),
        "--resume: expected a checkpoint; ": ("--resume", tmp_path / "taken"),
        "No such file": ("--data", tmp_path / "none"),
    }
    for message, options in refused.items():
        started = start(2, tmp_path / "said", "--data", text, "--out", tmp_path, *options)
        assert started.wait() == [2, 2], started.all_say()
        said = started.says(0)
        assert message in said
        assert said.count("\n") == 1
        assert started.says(1) == ""


def test_what_one_rank_lacks_ends_all_and_is_named(text, tmp_path):
    def hide(rank):
        if rank == 1:
            zofftk.train.load_corpus = missing

    def missing(*_, **__):
        raise InputError("data: expected a readable text file; text.py: No such file or directory")

    started = start(2, tmp_path / "said", "--data", text, "--out", tmp_path, enter=hide)
    assert started.wait() == [2, 2], started.all_say()
    assert started.says(0) == (
        "zofftk, rank 0: error: data: expected a readable text file; text.py: No such file or directory (on rank 1)\n"
    )
    assert started.says(1) == ""


def test_torchrun_and_ctrl_c(text, tmp_path):
    where = ["--data", text, "--out", tmp_path, "--name", "run", "--save-every", 2, "--steps", 2000, *SMALL]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        2,
        "-m",
        "zofftk",
        "train",
        *where,
    ]
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | variables,
    )
    try:
        await_checkpoint(tmp_path / "run" / "checkpoint", process, limit_s=200)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    checkpoint = load_rank_checkpoint(tmp_path / "run" / "checkpoint")
    assert f"Stopped after step {checkpoint.step} of 2000" in said
    assert "cannot go on" not in said
