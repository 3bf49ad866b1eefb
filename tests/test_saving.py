"""`zofftk.save` and `zofftk.load`: whole files, plain content, little memory."""

from __future__ import annotations

import collections
import enum
import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import zofftk
from tests.compare import assert_same_bits
from tests.test_pending import stepped
from zofftk.errors import InputError

pytestmark = pytest.mark.usefixtures("no_threads_left")
ROOT = Path(__file__).parent.parent
PEAK = ROOT / "tests" / "programs" / "load_peak.py"


def trained():
    model, opt = stepped()
    schedule = torch.optim.lr_scheduler.MultiStepLR(opt, [2, 4])
    opt.zero_grad()
    return model, opt, schedule


@pytest.mark.parametrize("read", [zofftk.load, lambda path: torch.load(path, weights_only=True)])
def test_a_dict_of_state_dicts_comes_back(tmp_path, read):
    model, opt, schedule = trained()
    content = {
        "model": model.state_dict(),
        "optimizer": opt.state_dict(),
        "schedule": schedule.state_dict(),  # holds a Counter
        "weight itself": model[0].weight,
        "plain": [1, 2.5, "text", None, True, b"bytes", 1j, (torch.bfloat16, torch.Size([2])), {3}],
        7: collections.OrderedDict(a=1),
    }
    zofftk.save(tmp_path / "new folder" / "file.pt", content)
    loaded = read(tmp_path / "new folder" / "file.pt")
    assert list(loaded) == list(content)
    assert loaded["plain"] == content["plain"]
    assert loaded["schedule"] == content["schedule"]
    for name, value in model.state_dict().items():
        assert_same_bits(loaded["model"][name], value)
    assert_same_bits(loaded["weight itself"].detach(), model[0].weight.detach())
    assert loaded["optimizer"]["param_groups"] == content["optimizer"]["param_groups"]
    opt.close()


def test_a_parameter_whose_value_is_on_its_way_is_saved_with_the_new_one(tmp_path):
    model, opt = stepped()
    zofftk.save(tmp_path / "file.pt", {"weight": model[0].weight})
    opt.close()
    assert_same_bits(zofftk.load(tmp_path / "file.pt")["weight"].detach(), model[0].weight.detach())


class Colour(enum.IntEnum):
    RED = 1


def attributed(value):
    tensor = torch.ones(2)
    tensor.note = value
    return tensor


def containing_itself():
    entries = [1]
    entries.append(entries)
    return entries


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (len, "of type builtins.builtin_function_or_method"),
        (np.float64(1.0), "of type numpy.float64"),
        (np.ones(2), "of type numpy.ndarray"),
        (Colour.RED, "of type .*Colour"),
        (torch.nn.Linear(1, 1), "of type torch.nn.modules.linear.Linear"),
        (torch.ones(2, device="meta"), "a tensor on the meta device, which has no values"),
        (attributed(len), "a tensor with the attribute 'note'"),
        (containing_itself(), "a list that contains itself"),
        (Path("a"), "of type pathlib"),
    ],
)
def test_what_a_safe_load_would_refuse_is_refused_with_its_keys(tmp_path, value, message):
    path = tmp_path / "file.pt"
    zofftk.save(path, {"a": 1})
    where = r"content\['optimizer'\]\['param_groups'\]\[0\]\['x'\]"
    with pytest.raises(TypeError, match=rf"cannot save {where}.*{message}.*expected tensors and plain values"):
        zofftk.save(path, {"model": {}, "optimizer": {"param_groups": [{"lr": 1.0, "x": value}]}})
    assert zofftk.load(path) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.pt"]


def test_what_is_accepted_loads_safely(tmp_path):
    values = [attributed({"a": [1]}), {1, "b"}, torch.nn.Parameter(torch.ones(1)), torch.ones(3)[1:], torch.ones(())]
    zofftk.save(tmp_path / "file.pt", {"values": values})
    loaded = torch.load(tmp_path / "file.pt", weights_only=True)["values"]
    assert loaded[0].note == {"a": [1]}
    assert loaded[1] == values[1]


def test_keys_and_the_whole_are_looked_at_too(tmp_path):
    with pytest.raises(TypeError, match=r"cannot save the key <Colour.RED: 1> of content\['a'\]"):
        zofftk.save(tmp_path / "file.pt", {"a": {Colour.RED: 1}})
    with pytest.raises(TypeError, match="expects a dict of state dicts and plain values, got Linear"):
        zofftk.save(tmp_path / "file.pt", torch.nn.Linear(1, 1))


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        zofftk.load(tmp_path / "none.pt")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"it is not a file: .*pipe") as caught:
        zofftk.load(tmp_path / "pipe")
    assert caught.value.errno == errno.EINVAL
    (tmp_path / "notes.txt").write_text("loss went down")
    torch.save({"a": Colour.RED}, tmp_path / "code.pt")
    for name in ("notes.txt", "code.pt"):
        with pytest.raises(InputError, match=rf"{name} is truncated, damaged or not one"):
            zofftk.load(tmp_path / name)


def test_a_flipped_bit_is_found_unless_the_check_is_off(tmp_path):
    path, weight = tmp_path / "file.pt", torch.rand(100)
    zofftk.save(path, {"weight": weight})
    content = bytearray(path.read_bytes())
    content[content.index(weight.numpy().tobytes()) + 100] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="the checksum of .* is wrong"):
        zofftk.load(path)
    assert not torch.equal(zofftk.load(path, check=False)["weight"], weight)


WRITER = """
import os, random, signal, sys, time, torch, zofftk
torch.set_num_threads(1)  # its threads would not survive the fork
path, delays, parent = sys.argv[1], random.Random(0), os.getpid()
zofftk.save(path, {"numbers": [torch.zeros(50_000)] * 4, "number": 0})

def is_whole():
    content = zofftk.load(path)
    return all(bool((part == content["number"]).all()) for part in content["numbers"])

for _ in range(12):
    if (child := os.fork()) == 0:
        number = 0
        while os.getppid() == parent:
            number += 1
            zofftk.save(path, {"numbers": [torch.full((50_000,), float(number)) for _ in range(4)], "number": number})
        os._exit(1)
    whole, end = [], time.monotonic() + 0.02 + delays.random() * 0.1
    while time.monotonic() < end:  # it is looked at while it is written, too
        whole.append(is_whole())
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert all(whole) and is_whole()
print("done")
"""


def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path):
    command = [sys.executable, "-c", WRITER, tmp_path / "file.pt"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert child.stdout == "done\n", child.stderr


@pytest.mark.parametrize(("count", "numel"), [(1, 12 << 20), pytest.param(512, 16384, marks=pytest.mark.slow)])
def test_loading_holds_no_second_copy(tmp_path, count, numel):
    """12 bytes a parameter of state, 4 of which were there before; with the model's 2, at most a quarter beside."""
    command = [sys.executable, PEAK, tmp_path / "file.pt", str(count), str(numel)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    save, load = map(float, said.split())
    assert save < 1.0
    assert load <= 8 + 0.25 * 12
