import itertools
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from zofftk.checkpoint import Checkpoint, load_checkpoint
from zofftk.cli import main
from zofftk.errors import InputError
from zofftk.launch import Launch
from zofftk.outputs import Outputs, run_folder
from zofftk.progress import open_progress
from zofftk.train import lr_factor, prepare, step_bytes, train, train_step
from zofftk.train_config import TrainConfig

STEPS = 6


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text("".join(f"def f{i}(x):\n    return x * {i}\n\n" for i in range(200)))
    return str(path)


def config_of(text: str, **options) -> TrainConfig:
    small = {"data": (text,), "steps": STEPS, "batch_size": 2, "seq_len": 16}
    return TrainConfig.from_options(small | options)


def run(config: TrainConfig, folder: Path, **options) -> Checkpoint:
    """The checkpoint that training ends with."""
    resume = options.pop("resume", None)
    outputs = Outputs(folder=folder, save=folder / "end.pt", **options)
    assert train(config, outputs, resume=resume, console=Console(file=StringIO())) == 0
    return load_checkpoint(folder / "end.pt")


def losses(checkpoint: Checkpoint) -> list[float]:
    return [sample["loss"] for sample in checkpoint.samples]


def assert_same_state(first: object, second: object) -> None:
    """Equal to the bit, tensors and all."""
    assert type(first) is type(second)
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_same_state(first[key], second[key])
    elif isinstance(first, list | tuple):
        for one, other in itertools.zip_longest(first, second):
            assert_same_state(one, other)
    elif isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    else:
        assert first == second


@pytest.fixture(scope="module")
def whole_run(text, tmp_path_factory) -> tuple[Path, Checkpoint]:
    """Six uninterrupted steps, saved after three as well."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(config_of(text), folder)


def test_a_second_run_has_the_same_losses_and_weights(whole_run, text, tmp_path):
    _, whole = whole_run
    again = run(config_of(text), tmp_path)
    assert losses(again) == losses(whole)
    assert_same_state(again.model, whole.model)


def test_the_seed_and_the_learning_rate_matter(whole_run, text, tmp_path):
    _, whole = whole_run
    assert losses(run(config_of(text, seed=1), tmp_path / "seed")) != losses(whole)
    faster = run(config_of(text, lr=1e-2), tmp_path / "lr")
    assert losses(faster)[0] == losses(whole)[0]
    assert losses(faster)[-1] != losses(whole)[-1]


@pytest.mark.parametrize(
    "options", [{"dtype": "bf16"}, {"dtype": "fp32"}, {"update": "delayed", "delay_after": 1}], ids=str
)
def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(text, tmp_path, options, monkeypatch):
    config = config_of(text, **options)
    whole = run(config, tmp_path / "whole")

    saved = tmp_path / "half" / "end.pt"
    with monkeypatch.context() as patch:
        patch.setattr("zofftk.train.open_progress", stop_after(3))
        outputs = Outputs(folder=tmp_path / "half", save=saved)
        assert train(config, outputs, console=Console(file=StringIO())) == 130
    half = load_checkpoint(saved)
    assert half.step == 3
    resumed = run(config, tmp_path / "resumed", resume=half)

    assert losses(resumed) == losses(whole)
    for name in ("model", "optimizer", "schedule", "step"):
        assert_same_state(getattr(resumed, name), getattr(whole, name))


def stop_after(steps: int):
    """A progress display during which Ctrl-C is pressed."""

    @contextmanager
    def open_progress(console, total, done):
        yield lambda sample, tokens: signal.raise_signal(signal.SIGINT) if sample["step"] + 1 == steps else None

    return open_progress


def test_saving_on_the_way_changes_no_bit(whole_run, text, tmp_path):
    _, whole = whole_run
    saving = run(config_of(text), tmp_path, save_every=1)
    assert losses(saving) == losses(whole)
    assert_same_state(saving.model, whole.model)


def test_the_loss_falls(text, tmp_path):
    long = losses(run(config_of(text, steps=60, lr=3e-3), tmp_path))
    assert sum(long[-5:]) / 5 < long[0] - 1.0


def test_a_run_writes_its_record_curve_and_timeline(whole_run):
    folder, whole = whole_run
    record = json.loads((folder / "record.json").read_text())
    assert record["samples"] == whole.samples
    assert record["config"]["preset"] == "tiny"
    assert record["report"]["steps"] == STEPS
    assert {"torch", "python", "numpy"} <= record["versions"].keys()
    assert {"step", "loss", "lr", "grad_norm", "step_ms", "forward_ms", "backward_ms"} == record["samples"][0].keys()
    assert record["samples"][0]["grad_norm"] > 0
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "timeline.json").read_text())
    assert {path.name for path in folder.iterdir()} == {"record.json", "loss.png", "timeline.json", "end.pt"}


def test_the_summary_says_what_was_counted(text, tmp_path):
    console = Console(file=StringIO(), width=120)
    assert train(config_of(text), Outputs(folder=tmp_path / "run"), console=console) == 0
    shown = console.file.getvalue()
    for words in (
        "parameters",
        "loss, first -> last step",
        "bytes per parameter on the device",
        "bytes per parameter on the host",
        "bytes down per step",
        "bytes up per step",
        "forward + backward",
        "waiting for gradients",
        "Adam",
        "copy-back",
        "step 6/6",
        str(tmp_path / "run"),
    ):
        assert words in shown.replace("\n", "") or words in shown
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_the_learning_rate_warms_up_and_ends_at_a_tenth():
    factors = [lr_factor(step, steps=400) for step in range(400)]
    assert factors[0] == pytest.approx(1 / 20)
    assert factors[19] == factors[20] == 1.0
    assert factors[19:] == sorted(factors[19:], reverse=True)
    assert factors[-1] == pytest.approx(0.1)
    assert lr_factor(0, steps=1) == 1.0


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_loss_rate_and_time_left(terminal):
    console = Console(file=StringIO(), force_terminal=terminal, width=120)
    with open_progress(console, 10, 0) as show:
        show({"step": 4, "loss": 1.25, "step_ms": 100.0}, 200)
    shown = console.file.getvalue()
    for part in ("5/10", "loss 1.250", "2,000 tokens/s", "left"):
        assert part in shown


def test_fp16_scales_its_loss_and_a_skipped_step_leaves_the_schedule(text, tmp_path):
    config = config_of(text, dtype="fp16", steps=6)
    training = prepare(config, None, torch.device("cpu"), Launch())
    training.optimizer._scale.value = training.optimizer._engine.loss_scale = 2.0**40  # overflows for a while
    rates, scales = [], []
    for _ in range(40):
        rates.append(training.schedule.get_last_lr()[0])
        sample = train_step(training)
        scales.append(training.optimizer.loss_scale)
        if not training.optimizer.last_step_skipped:
            break
    training.optimizer.close()
    skipped = training.optimizer.skipped_steps
    assert 10 < skipped < 39
    assert scales == [2.0 ** (39 - k) for k in range(skipped)] + [2.0 ** (40 - skipped)]
    assert len(set(rates)) == 1  # the schedule waited
    assert training.schedule.last_epoch == 1
    assert math.isfinite(sample["grad_norm"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "--steps: expected a whole number of at least 1, got 0"),
        ({"batch_size": -1}, "--batch-size: expected a whole number of at least 1, got -1"),
        ({"seq_len": 0}, "--seq-len"),
        ({"lr": -0.1}, "--lr: expected a finite number above 0, got -0.1"),
        ({"lr": float("nan")}, "--lr: expected a finite number above 0, got nan"),
        ({"max_grad_norm": 0.0}, "--max-grad-norm"),
        ({"seed": -1}, "--seed: expected a whole number of at least 0, got -1"),
        ({"seed": 10**23}, r"--seed: expected a whole number below 2\*\*64, got 1000"),
        ({"batch_size": 10**30}, r"--batch-size: expected a whole number below 2\*\*63, got 1000"),
        ({"dtype": "int8"}, "--dtype: expected one of bf16, fp32, fp16, got int8"),
        ({"preset": "huge"}, "preset: expected one of tiny, demo, .* got 'huge'"),
    ],
)
def test_bad_options_are_refused(text, options, message):
    with pytest.raises(InputError, match=message):
        config_of(text, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.5}, "--lr: expected 0.001, as in the checkpoint, got 0.5"),
        ({"preset": "demo"}, "--preset: expected tiny, as in the checkpoint, got demo"),
        ({"dtype": "fp32"}, "--dtype: expected bf16, as in the checkpoint, got fp32"),
    ],
)
def test_a_continuation_may_not_change_what_its_losses_depend_on(text, options, message):
    with pytest.raises(InputError, match=message):
        config_of(text).resumed_with(options)


def test_a_continuation_may_be_longer_and_find_its_text_elsewhere(text):
    longer = config_of(text).resumed_with({"steps": 9, "data": ("elsewhere",), "lr": 1e-3})
    assert (longer.steps, longer.data, longer.lr) == (9, ("elsewhere",), 1e-3)


def test_more_steps_follow_their_own_schedule(whole_run, text, tmp_path):
    _, whole = whole_run
    outputs = Outputs(folder=tmp_path / "more", save=tmp_path / "more.pt")
    assert train(config_of(text, steps=12), outputs, resume=whole) == 0
    rates = [sample["lr"] for sample in load_checkpoint(tmp_path / "more.pt").samples]
    expected = [config_of(text).lr * lr_factor(step, steps=12) for step in range(6, 12)]
    assert rates[6:] == pytest.approx(expected)


def test_a_finished_run_and_another_text_cannot_be_resumed(whole_run, text, tmp_path):
    _, whole = whole_run
    outputs = Outputs(folder=tmp_path / "run")
    with pytest.raises(InputError, match="--resume: the run is complete, with 6 steps: to train on, give a larger --s"):
        train(config_of(text), outputs, resume=whole)
    with pytest.raises(InputError, match="--steps: expected more than the 6 of the checkpoint, got 5"):
        train(config_of(text, steps=5), outputs, resume=whole)
    other = tmp_path / "other.txt"
    other.write_text("something else " * 20)
    with pytest.raises(InputError, match="expected the text of the checkpoint"):
        train(config_of(str(other), steps=9), outputs, resume=whole)
    assert not outputs.folder.exists()


def test_a_model_beyond_the_memory_is_refused_before_it_is_built(text, tmp_path):
    outputs = Outputs(folder=tmp_path / "run")
    with pytest.raises(InputError, match=r"--preset: expected a model that fits .* 70b needs"):
        train(TrainConfig.from_options({"preset": "70b", "data": (text,), "device": "cpu"}), outputs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here cuda is a right answer")
def test_a_device_that_is_not_there(text, tmp_path):
    with pytest.raises(InputError, match="--device: expected a GPU that torch and CuPy can use, got cuda"):
        train(config_of(text, device="cuda"), Outputs(folder=tmp_path / "run"))


def test_outputs_are_checked_before_the_run(whole_run, tmp_path):
    folder, _ = whole_run
    with pytest.raises(InputError, match="already holds a run"):
        Outputs(folder=folder)
    with pytest.raises(InputError, match="--save-every: expected a whole number of at least 1, got 0"):
        Outputs(folder=tmp_path / "run", save_every=0)
    with pytest.raises(InputError, match=r"--save: .*: expected a file, it is a folder"):
        Outputs(folder=tmp_path / "run", save=tmp_path)
    with pytest.raises(InputError, match=r"--out: expected a folder, .*record\.json is a file"):
        Outputs(folder=folder / "record.json" / "run")
    with pytest.raises(InputError, match="--name: expected the name of a folder"):
        run_folder(tmp_path, "a/b", "tiny")
    for name in ("a\nb", "\x1b[31m", "\udcff"):
        with pytest.raises(InputError, match="--name: expected printable characters"):
            run_folder(tmp_path, name, "tiny")
    for parent in (tmp_path, tmp_path / "not" / "there"):
        with pytest.raises(InputError, match="--out: .*(at most 255 bytes|File name too long)"):
            Outputs(folder=parent / ("n" * 300))
    with pytest.raises(InputError, match="--save: .*File name too long"):
        Outputs(folder=tmp_path / "run", save=tmp_path / ("s" * 300))
    with pytest.raises(InputError, match="--save: expected names of at most 255 bytes"):
        Outputs(folder=tmp_path / "run", save=tmp_path / "new" / ("s" * 300))
    with pytest.raises(InputError, match="--out: .*(a path of less than|File name too long)"):
        Outputs(folder=tmp_path / "/".join(["deep"] * 1000))
    for taken in ("record.json", "."):
        with pytest.raises(InputError, match="--save: expected a name that the run does not use itself"):
            Outputs(folder=tmp_path / "run", save=tmp_path / "run" / taken)


def test_a_checkpoint_is_put_only_where_a_file_can_be(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name, kind in (("pipe", "named pipe"), ("link", "named pipe"), ("loop", "symbolic link to itself")):
        with pytest.raises(InputError, match=f"--save: .*: expected a file, it is a {kind}"):
            Outputs(folder=tmp_path / "run", save=tmp_path / name)
    with pytest.raises(InputError, match="--save: /dev/null: expected a file, it is a device"):
        Outputs(folder=tmp_path / "run", save=Path("/dev/null"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint.pt").symlink_to("../pipe")
    with pytest.raises(InputError, match="--save-every: .*: expected a file, it is a named pipe"):
        Outputs(folder=tmp_path / "run", save_every=1)


@contextmanager
def largest_file(size: int):
    """Writes beyond `size` fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_the_checkpoint_and_nothing_else(text, tmp_path, capsys):
    saved = tmp_path / "big.pt"
    options = ["--data", text, "--steps", "3", "--batch-size", "2", "--seq-len", "16", "--out", str(tmp_path)]
    assert main(["train", *options, "--name", "whole", "--save", str(saved)]) == 0
    before = saved.read_bytes()
    capsys.readouterr()
    with largest_file(100_000):
        code = main(["train", *options, "--name", "run", "--save", str(saved), "--save-every", "1"])
    printed = capsys.readouterr()
    assert code == 1
    assert printed.err == f"zofftk: error: [Errno 27] File too large: '{saved}'\n"
    for step in (1, 2, 3):
        assert f"warning: no checkpoint after step {step}, going on: [Errno 27] File too large" in printed.out
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"record.json", "loss.png", "timeline.json"}
    assert saved.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "run", "big.pt"}


def test_a_picture_that_cannot_be_written_keeps_the_rest(text, tmp_path, monkeypatch):
    def full(path, samples):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("zofftk.train.draw_loss_curve", full)
    console = Console(file=StringIO(), width=200)
    with pytest.raises(OSError, match=r"No space left on device: .*loss\.png"):
        train(config_of(text), Outputs(folder=tmp_path / "run"), console=console)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"record.json", "timeline.json"}
    assert "record.json, timeline.json" in console.file.getvalue()


KILLED = """
import os, sys, time, random, signal
from pathlib import Path
from zofftk.cli import main
from zofftk.checkpoint import load_checkpoint
import zofftk.train, zofftk.optimizer
out, text = sys.argv[1:]
rng = random.Random(0)
saved = Path(out, "end.pt")
options = ["--data", text, "--steps", "100000", "--seq-len", "16", "--batch-size", "2"]
keep = ["--save", str(saved), "--save-every", "1", "--out", out]
for turn in range(4):
    child = os.fork()
    if child == 0:
        os._exit(main(["train", *options, *keep, "--name", f"r{turn}"]))
    before = saved.stat().st_mtime_ns if saved.exists() else 0
    deadline = time.monotonic() + 60
    while not (saved.exists() and saved.stat().st_mtime_ns != before) and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(rng.random() * 0.1)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    checkpoint = load_checkpoint(saved)
    assert checkpoint.step == len(checkpoint.samples) >= 1
    print("loaded")
"""


def test_a_killed_run_leaves_a_whole_checkpoint(text, tmp_path):
    """Every step saves over the same file; kill -9 comes at any moment of it."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000"}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), text], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loaded") == 4


def test_a_batch_beyond_the_memory_is_refused_before_the_model_is_built(text, tmp_path):
    outputs = Outputs(folder=tmp_path / "run")
    with pytest.raises(InputError, match="--batch-size: expected a batch that fits .* 100000000 sequences of 16"):
        train(config_of(text, batch_size=10**8, device="cpu"), outputs)
    assert not outputs.folder.exists()
    for preset in ("tiny", "demo", "24m", "1b"):
        assert step_bytes(TrainConfig.from_options({"preset": preset, "batch_size": 1})) < 2**31


def command_line(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "zofftk", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_ctrl_c_saves_says_where_and_can_be_resumed(text, tmp_path, capsys):
    options = ["--data", text, "--steps", "100000", "--seq-len", "16", "--batch-size", "2"]
    process = command_line(*options, "--out", tmp_path, "--name", "run", "--save-every", "2")
    saved = tmp_path / "run" / "checkpoint.pt"
    deadline = time.monotonic() + 120
    while not saved.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert f"zofftk train --resume {saved}" in said
    assert f"Written to {tmp_path / 'run'}: record.json, loss.png, timeline.json" in said
    checkpoint = load_checkpoint(saved)
    assert checkpoint.step == len(checkpoint.samples) >= 2

    steps = checkpoint.step + 1
    # Here, not in a process of its own, which would spend seconds on its imports.
    assert main(["train", "--resume", str(saved), "--steps", str(steps), "--out", str(tmp_path), "--name", "on"]) == 0
    assert f"step {steps}/{steps}" in capsys.readouterr().out
