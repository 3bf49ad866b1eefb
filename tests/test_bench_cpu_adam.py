"""The CPU Adam benchmark runs and writes every sample."""

import argparse
import json

import torch

from zofftk.bench import cpu_adam


def test_small_run_writes_a_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "deepspeed.ops.adam", None)
    parser = argparse.ArgumentParser()
    cpu_adam.add_arguments(parser)
    path = tmp_path / "record.json"
    before = torch.get_num_threads()
    arguments = ["--numel", "4096", "1e4", "--repeats", "3", "--threads", "1", "--json", str(path)]
    assert cpu_adam.run(parser.parse_args(arguments)) == 0
    assert torch.get_num_threads() == before
    record = json.loads(path.read_text())
    assert [result["numel"] for result in record["results"]] == [4096, 10000]
    assert all(len(times) == 3 for result in record["results"] for times in result["seconds"].values())
    assert {"zofftk", "torch fused + 2 casts", "roof plain"} <= set(record["results"][0]["seconds"])
    assert record["environment"]["threads"] == 1
    printed = capsys.readouterr().out
    assert "4,096 parameters" in printed
    assert "DeepSpeedCPUAdam: not measured" in printed
