"""Training runs: their bits, their files, what an interruption leaves, and the commands that carry them out."""

import argparse
import dataclasses
import importlib
import json
import sysconfig
from pathlib import Path

import pytest
import torch

from experiments import convergence, convergence_bert, convergence_gpt, convergence_sweep
from experiments.curves import gpt, held_out, kept, pool, trainer
from experiments.curves.run import Run
from experiments.curves.trainer import Trainer, train_run
from zofftk.errors import InputError

MODULES = ["argparse.py", "ast.py", "enum.py", "codecs.py", "logging/config.py", "asyncio/tasks.py"]
BASE = Run(
    experiment="quick/test",
    task="gpt",
    model="quick",
    optimizer="AdamW",
    update="synchronous",
    delay_after=None,
    lr=1e-2,
    seed=0,
    steps=12,
    batch_size=4,
    evaluate_every=5,
)
KINDS = {
    "plain": {"update": "plain"},
    "torch": {"update": "torch"},
    "synchronous": {},
    "delayed": {"update": "delayed", "delay_after": 3},
    "SGD": {"optimizer": "SGD", "lr": 0.1},
    "Lion, delayed": {"optimizer": "Lion", "lr": 1e-3, "update": "delayed", "delay_after": 0},
}


@pytest.fixture(autouse=True)
def own_files(tmp_path, monkeypatch):
    """Few modules for a text, and folders of its own."""
    root = Path(sysconfig.get_path("stdlib"))
    files = {Path(name): (root / name).read_text() for name in MODULES}
    monkeypatch.setattr(held_out, "read_stdlib_files", lambda: files)
    monkeypatch.setattr(kept, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(kept, "CHECKPOINTS", tmp_path / "runs")
    monkeypatch.setattr(gpt, "BATCHES_AT_THE_END", 4)
    held_out.load_split.cache_clear()
    yield
    held_out.load_split.cache_clear()


def made(**changes) -> dict:
    """The record of a run that was not interrupted."""
    run = dataclasses.replace(BASE, **changes)
    assert train_run(run)
    record = kept.load_record(run)
    assert record is not None
    return record


def test_plain_and_synchronous_have_the_same_bits_and_others_have_not():
    records = {name: made(**KINDS[name], lr=3e-2) for name in ("plain", "synchronous", "delayed", "torch")}
    losses = {name: record["samples"]["losses"] for name, record in records.items()}
    assert losses["plain"] == losses["synchronous"]
    assert records["plain"]["samples"] == records["synchronous"]["samples"]
    assert losses["delayed"][:4] == losses["synchronous"][:4]  # a gradient is late from the fourth step on
    assert losses["delayed"][4] != losses["synchronous"][4]
    assert losses["torch"] != losses["plain"]
    assert losses["torch"] == pytest.approx(losses["plain"], rel=0.02)


def test_clipping_is_part_of_it(monkeypatch):
    """The runs above clip: with a bound that never binds, losses are others."""
    clipped = made()["samples"]["losses"]
    monkeypatch.setattr(trainer, "MAX_GRAD_NORM", 1e9)
    kept.forget(BASE)
    assert made()["samples"]["losses"] != clipped


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_run_goes_on_with_the_same_bits(kind):
    run = dataclasses.replace(BASE, **KINDS[kind])
    whole = made(**KINDS[kind])
    kept.forget(run)
    assert not train_run(run, stop_after=4)
    assert kept.load_record(run) is None
    assert kept.checkpoint_path(run).exists()
    assert train_run(run)
    record = kept.load_record(run)
    assert record is not None
    assert record["samples"] == whole["samples"]
    assert record["results"]["held_out_loss"] == whole["results"]["held_out_loss"]
    assert [session["first_step"] for session in record["sessions"]] == [0, 4]
    assert not kept.checkpoint_path(run).exists()


def test_a_killed_run_goes_on_from_its_last_checkpoint(monkeypatch):
    """Nothing is written when it dies; what counts is the checkpoint of before."""
    whole = made()
    kept.forget(BASE)
    monkeypatch.setattr(trainer, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    step, died = Trainer.train_step, RuntimeError("killed")

    def dies(self):
        if self.step == 7:
            raise died
        step(self)

    monkeypatch.setattr(Trainer, "train_step", dies)
    with pytest.raises(RuntimeError, match="killed"):
        train_run(BASE)
    monkeypatch.setattr(Trainer, "train_step", step)
    assert train_run(BASE)
    record = kept.load_record(BASE)
    assert record is not None
    assert record["samples"] == whole["samples"]
    assert record["sessions"][1]["first_step"] == 7


def test_the_last_delayed_update_counts():
    """A run of one step that is late has, in the end, learnt as much as one that is not."""
    late = made(steps=1, update="delayed", delay_after=0)["results"]["held_out_loss"]
    assert late == made(steps=1)["results"]["held_out_loss"]


def test_records_hold_what_is_needed_to_judge_them():
    record = made(seed=3)
    assert {"command", "git", "versions", "hardware", "sessions"} <= record.keys()
    assert (record["config"]["seed"], record["config"]["torch_threads"]) == (3, 1)
    assert {"sha256", "files", "characters", "tokens"} == record["data"]["held_out"].keys()
    assert len(record["samples"]["losses"]) == 12
    assert [evaluation["step"] for evaluation in record["samples"]["evaluations"]] == [5, 10]
    assert record["results"]["params"] == gpt.MODELS["quick"].num_params


def test_losses_keep_their_fp32_bits():
    run = Trainer(BASE)
    exact = []
    loss_of = run.task.loss

    def seen(model, step):
        loss = loss_of(model, step)
        exact.append(loss.detach().clone())
        return loss

    run.task.loss = seen
    for _ in range(5):
        run.train_step()
    run.close()
    assert torch.equal(torch.tensor(run.losses), torch.stack(exact))
    assert json.loads(json.dumps(run.losses)) == run.losses


def test_another_run_under_the_same_name_is_refused():
    made()
    other = dataclasses.replace(BASE, batch_size=8)
    with pytest.raises(InputError, match=r"expected a run with batch_size 8 in .*, got 4; --fresh makes it again"):
        kept.load_record(other)


def test_another_text_under_a_checkpoint_is_refused(monkeypatch):
    assert not train_run(BASE, stop_after=2)
    monkeypatch.setattr(held_out, "TABLES", "ast.py")  # one module less
    held_out.load_split.cache_clear()
    with pytest.raises(InputError, match="expected the data that .* was trained on, got another"):
        train_run(BASE)


def test_a_damaged_record_is_named():
    made()
    kept.record_path(BASE).write_text("{")
    with pytest.raises(InputError, match="expected a record in .*synchronous_seed0.json"):
        kept.load_record(BASE)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optimizer": "Muon"}, "optimizer: expected one of .*; got Muon"),
        ({"update": "lookahead"}, "update: expected one of plain, torch, synchronous, delayed; got lookahead"),
        ({"update": "delayed"}, "delay_after: expected a number with a delayed update alone; got None"),
        ({"delay_after": 0}, "delay_after: expected a number with a delayed update alone; got 0"),
        ({"update": "plain", "optimizer": "SGD"}, "expected AdamW where no engine is; got SGD"),
    ],
)
def test_runs_that_make_no_sense_are_refused(changes, says):
    with pytest.raises(InputError, match=says):
        dataclasses.replace(BASE, **changes)


# -- many runs -----------------------------------------------------------------------------------------------


def options_of(module, *arguments) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(("module", "count"), [(convergence_gpt, 8), (convergence_sweep, 9)])
def test_quick_settings_run_plan_and_report(module, count, capsys):
    assert module.run(options_of(module, "--quick", "--workers", "1")) == 0
    made = capsys.readouterr().out
    assert made.count(" finished (") == count
    assert len([*kept.RESULTS.rglob("*.json")]) == count
    assert module.run(options_of(module, "--quick", "--plan")) == 0
    plan = capsys.readouterr().out
    assert plan.count("  finished") == count
    assert "to do: 0 min of one core" in plan
    assert module.run(options_of(module, "--quick", "--report")) == 0
    report = capsys.readouterr().out
    assert report.strip()
    assert made.endswith(report)
    assert module is convergence_sweep or "Plain and synchronous losses, seed 1: equal bit for bit in all 12" in report


def test_a_plan_knows_what_is_done_and_times_the_rest(capsys):
    plain, torch_, synchronous, *_ = convergence_gpt.runs(quick=True)
    assert train_run(plain)
    assert not train_run(synchronous, stop_after=5)
    lines = pool.describe_plan([plain, torch_, synchronous], workers=2)
    assert [line.split("min  ")[1] for line in lines[:3]] == ["finished", "to do", "at step 5"]
    kept.forget(plain)
    timed = pool.describe_plan([plain], workers=1)
    assert timed[0].endswith("to do")
    assert not kept.record_path(plain).exists()


def test_runs_in_other_processes_give_their_own_records(monkeypatch):
    """With as many at a time as there are; each writes what it was asked for."""
    asked = []

    class Here:
        """Stands for the pool of processes, which would not see this test's folders."""

        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, function, run):
            asked.append(run)
            future = pool.Future()
            future.set_result(function(run))
            return future

    monkeypatch.setattr(pool, "ProcessPoolExecutor", Here)
    runs = convergence_sweep.runs(quick=True)[:5]
    assert pool.train_all(runs, workers=2)
    assert asked == runs
    assert all(kept.load_record(run) is not None for run in runs)
    assert pool.train_all(runs, workers=2)
    assert asked == runs  # nothing is made twice


def test_an_interrupted_run_stops_those_after_it(monkeypatch, capsys):
    monkeypatch.setattr(pool, "train_run", lambda run: run.delay_after != 40)
    options = options_of(convergence_sweep, "--quick", "--workers", "1")
    assert convergence_sweep.run(options) == 130
    out = capsys.readouterr().out
    assert out.count(" finished (") == 1
    assert out.count(" interrupted and saved (") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "nothing"], "--only: expected a part of a run's name, got nothing"),
        (["--workers", "0"], "--workers: expected at least 1, got 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments, says, capsys):
    assert convergence_gpt.run(options_of(convergence_gpt, "--quick", *arguments)) == 2
    assert says in capsys.readouterr().err


def test_fresh_makes_only_what_was_chosen_again(capsys):
    assert convergence_gpt.run(options_of(convergence_gpt, "--quick", "--workers", "1")) == 0
    before = {path: path.stat().st_mtime_ns for path in kept.RESULTS.rglob("*.json")}
    options = options_of(convergence_gpt, "--quick", "--workers", "1", "--fresh", "--only", "plain_seed0")
    assert convergence_gpt.run(options) == 0
    changed = [path.name for path, time in before.items() if path.stat().st_mtime_ns != time]
    assert changed == ["quick_AdamW_lr0.01_plain_seed0.json"]


def test_the_long_runs_are_what_is_asked_for():
    experiments = (convergence_gpt, convergence_sweep, convergence_bert)
    runs = [run for module in experiments for run in module.runs(quick=False)]
    assert len({(run.experiment, run.name) for run in runs}) == len(runs)
    params = {name: config.num_params for name, config in gpt.MODELS.items()}
    assert all(abs(params[name] / 1e6 - float(name[:-1])) < 0.06 for name in ("0.7m", "1.3m", "10.5m"))
    # Two evaluations in the last tenth at least, so that a slope can be stated.
    pretraining = [run for run in runs if run.task == "gpt"]
    assert all(run.steps % run.evaluate_every == 0 and run.steps >= 10 * run.evaluate_every for run in pretraining)
    small = [run for run in runs if run.model == "1.3m"]
    for update in ("synchronous", "delayed"):
        assert {run.seed for run in small if run.update == update} == {0, 1, 2}
    assert [run.update for run in runs if run.model == "10.5m"] == ["synchronous", "delayed"]
    sweep = {
        (run.optimizer, run.lr, run.delay_after, run.seed) for run in runs if run.experiment == "convergence_sweep"
    }
    assert len(sweep) == (5 + 3 + 3) * 3 * 3  # rates of three optimizers, updates, seeds
    assert importlib.import_module("experiments.convergence") is convergence
