"""`zofftk plan` and what it may be asked about; the warning of an optimizer, and the prediction of a run."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging

import pytest
import torch

import zofftk
from zofftk import memory_needs
from zofftk.cli import main
from zofftk.host_memory import available_memory
from zofftk.memory_needs import needs_of
from zofftk.plan import Plan, Setting
from zofftk.plan.assumed import assumed_numbers
from zofftk.plan.finding import find_source
from zofftk.plan.sources import preset_source
from zofftk.plan.training import HOW_TO, predict
from zofftk.plan.trials import Trials
from zofftk.profile import load_profile, profile_path, this_path, write_profile
from zofftk.train_config import TrainConfig

MODULE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(100, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(7))

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x @ self.tokens.weight.T

def build():
    return Model()

def broken():
    raise RuntimeError("no such thing")

def number(*args):
    return 3

def frozen():
    return Model().requires_grad_(False)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def test_tables_json_and_timeline(here, capsys):
    arguments = ["plan", "tiny", "--quick", "--json", "plan.json", "--timeline", "timeline.json", "--micro-batch", "2"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    for words in ("yes, it fits", "parameters", "staging slots", "fp32 masters", "backward", "gpu.reserved_gib"):
        assert words in said
    answer = Plan.from_dict(json.loads((here / "plan.json").read_text()))
    assert answer.setting == Setting(micro_batch=2, seq=64)
    events = json.loads((here / "timeline.json").read_text())["traceEvents"]
    assert {"forward", "backward"} <= {event["name"] for event in events}
    assert main(["plan", "tiny", "--quick", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "tiny"


def test_a_function_of_the_user_s(here):
    source = find_source("own_model:build")
    assert (source.layers, source.can_recompute, source.can_slice) == (7, True, False)
    trials = Trials(source, load_profile("a100"))
    assert trials.num_params() == 100 * 32 + 7 * 33 * 32
    setting = Setting(micro_batch=2, seq=16)
    assert trials.memory(setting, 9).num_params == 100 * 32 + 9 * 33 * 32
    assert trials.step(setting).flops == 2 * 16 * 2 * (3 * (7 * 32 * 32 + 32 * 100))


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_a_hugging_face_configuration(here):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    content = {"model_type": "llama", "num_hidden_layers": 7, "vocab_size": 256, "max_position_embeddings": 128}
    (here / "config.json").write_text(json.dumps(content | sizes))
    for path in ("config.json", str(here)):
        source = find_source(path)
        assert (source.layers, source.default.seq, source.max_seq) == (7, 128, 128)
    trials = Trials(source, load_profile("v100-dgx2"))
    kept, recomputed = (Setting(micro_batch=8, seq=64, recompute=recompute) for recompute in (False, True))
    assert trials.memory(recomputed).device.total_bytes < trials.memory(kept).device.total_bytes
    assert trials.step(recomputed).flops > trials.step(kept).flops
    assert trials.memory(kept, 9).num_params > trials.memory(kept).num_params


MISTAKES = {
    "no such model": (["gpt5"], "model: expected one of tiny, "),
    "no such file": (["missing/config.json"], "model: missing/config.json: No such file or directory"),
    "not a configuration": (["empty.json"], "model: empty.json: expected a Hugging Face configuration"),
    "no such module": (["nowhere:build"], "model: nowhere:build: cannot import nowhere: ModuleNotFoundError"),
    "no such function": (["own_model:missing"], "expected module:function, own_model has no function 'missing'"),
    "it raises": (["own_model:broken"], "own_model:broken: cannot be built: RuntimeError: no such thing"),
    "no module": (["own_model:number"], "expected own_model:number to return a torch module, it returned int"),
    "no such profile": (["tiny", "--profile", "cray"], "profile: expected one of a100, "),
    "ranks": (["tiny", "--ranks", "3", "--tp", "2"], "--ranks: expected a multiple of the 2 of --tp, got 3"),
    "tp": (["tiny", "--tp", "8"], "tp: expected a divisor of the 4 heads, got 8"),
    "tp of a function": (["own_model:build", "--tp", "2"], "tp: expected 1, only the layers of presets can be cut"),
    "micro-batch": (["tiny", "--micro-batch", "0"], "--micro-batch: expected a whole number of at least 1, got 0"),
    "far too much": (["tiny", "--micro-batch", str(10**20)], "micro_batch: expected a whole number of at least 1 and"),
    "bucket": (["tiny", "--bucket-mib", "nan"], "--bucket-mib: expected a number above 0, got nan"),
    "nothing": ([""], "model: expected one of tiny, "),
    "nothing is trained": (
        ["own_model:frozen"],
        "own_model:frozen: a dry run of it, on tensors without values, failed",
    ),
    "no loss": (["own_model:build", "--loss", "own_model:number"], "own_model:build: a dry run of it"),
    "loss without function": (["own_model:build", "--loss", "loss"], "--loss: expected module:function, got 'loss'"),
    "policy": (["tiny", "--policy", "delayed, inside backward", "--ranks", "2"], "needs one rank and one backward"),
    "loss": (["tiny", "--loss", "own_model:build"], "--loss: expected module:function as the model with it"),
    "json": (["tiny", "--quick", "--json", "own_model.py/plan.json"], "--json: own_model.py/plan.json"),
}


@pytest.mark.parametrize(("arguments", "said"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_line(here, capsys, arguments, said):
    (here / "empty.json").write_text("{}")
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_layers_shared_by_devices(here):
    source = dataclasses.replace(preset_source("tiny"), default=Setting(micro_batch=4, seq=64))
    trials = Trials(source, load_profile("v100-dgx2"))
    one, two = (trials.memory(Setting(micro_batch=4, seq=64, tp=tp)) for tp in (1, 2))
    assert two.num_params < one.num_params
    assert two.device.items["parameters"] < one.device.items["parameters"]


def test_numbers_that_are_assumed():
    found = assumed_numbers(profile_path("v100-dgx2"))
    assert any(line.startswith("gpu.reserved_gib = 0.75 (assumed") for line in found)
    assert not any(line.startswith("gpu.memory_gib") for line in found)


# -- at run time -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"update": "delayed"}, {"bucket_bytes": 65536}])
def test_needs_are_what_the_engine_then_takes(options):
    params = [torch.nn.Parameter(torch.zeros(500, 333, dtype=torch.bfloat16)) for _ in range(3)]
    with_options = zofftk.OffloadConfig(**options)
    needs = needs_of(params, with_options, 2)
    opt = zofftk.OffloadAdamW(params, config=with_options)
    report = opt.report()
    opt.close()
    assert needs.host_bytes == pytest.approx(report.host_bytes, rel=0.001)
    assert needs.device_bytes == pytest.approx(report.staging_bytes + 2 * 500 * 333, rel=0.05)


def test_one_warning_where_the_host_runs_out(monkeypatch, caplog):
    model = torch.nn.Linear(512, 512).bfloat16()
    num_bytes = 512 * 513 * 14
    for free, warns in ((2 * num_bytes, False), (num_bytes // 2, True)):
        monkeypatch.setattr(memory_needs, "available_memory", lambda free=free: free)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "zofftk"):
            zofftk.OffloadAdamW(model.parameters()).close()
        found = [record.getMessage() for record in caplog.records if "run out of memory" in record.getMessage()]
        assert len(found) == warns
        assert all("needs 3.5 MiB of host memory, of which 1.8 MiB can be had" in text for text in found)
        assert all("What helps" in text for text in found)


def test_control_groups_count(tmp_path):
    own = tmp_path / "cgroup"
    own.write_text("0::/jobs/one\n")
    folder = tmp_path / "jobs" / "one"
    folder.mkdir(parents=True)
    everything = available_memory(tmp_path, own)
    (folder / "memory.max").write_text("1000000\n")
    (folder / "memory.current").write_text("700000\n")
    assert available_memory(tmp_path, own) == 300000 < everything
    (folder / "memory.stat").write_text("anon 500000\ninactive_file 150000\n")
    assert available_memory(tmp_path, own) == 450000


def test_the_step_of_a_run_is_predicted_where_the_machine_is_known(here):
    config = TrainConfig.from_options({"preset": "tiny"})
    assert predict(config, dp=1, tp=1).reason == HOW_TO
    profile = load_profile("laptop24")
    write_profile(profile, this_path(), "a test")
    predicted = predict(config, dp=1, tp=1)
    source = preset_source("tiny")
    assert predicted.step_ms == pytest.approx(Trials(source, load_profile("this")).step(source.default).step_ms)
    late = predict(dataclasses.replace(config, update="delayed"), dp=2, tp=1)
    assert late.step_ms > 0
    assert predict(config, dp=1, tp=2).step_ms is None
    this_path().write_text("[gpu]")
    assert "profile:" in predict(config, dp=1, tp=1).reason
