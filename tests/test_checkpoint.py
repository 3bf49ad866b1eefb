import dataclasses
import os

import pytest
import torch

from zofftk.atomic_file import replacing
from zofftk.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from zofftk.errors import InputError
from zofftk.gpt import build_gpt
from zofftk.gpt_config import GPTConfig

MODEL = GPTConfig(layers=1, hidden=16, heads=2, vocab=20, seq=8)


@pytest.fixture
def checkpoint() -> Checkpoint:
    model = build_gpt(MODEL, seed=0, dtype=torch.bfloat16)
    return Checkpoint(
        step=3,
        config={"preset": "tiny", "data": ("a", "b")},
        model_config=dataclasses.asdict(MODEL),
        data_fingerprint="abc",
        samples=[{"step": 0, "loss": 0.1 + 0.2, "grad_norm": None}],
        model=model.state_dict(),
        optimizer={"state": {0: {"master": torch.randn(4)}}, "param_groups": [{"lr": 1e-3}]},
        schedule={"last_epoch": 3},
    )


@pytest.fixture
def path(tmp_path, checkpoint):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, checkpoint)
    return path


def test_comes_back_as_it_was(path, checkpoint):
    loaded = load_checkpoint(path)
    for field in dataclasses.fields(Checkpoint):
        if field.name not in ("model", "optimizer"):
            assert getattr(loaded, field.name) == getattr(checkpoint, field.name)
    assert all(torch.equal(loaded.model[name], tensor) for name, tensor in checkpoint.model.items())
    assert torch.equal(loaded.optimizer["state"][0]["master"], checkpoint.optimizer["state"][0]["master"])


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.99])
def test_truncated(path, kept):
    os.truncate(path, int(kept * path.stat().st_size))
    with pytest.raises(
        InputError, match=r"expected a whole checkpoint; .*checkpoint\.pt is truncated, damaged or not one"
    ):
        load_checkpoint(path)


def test_one_flipped_bit_in_a_weight(path, checkpoint):
    weight = checkpoint.model["blocks.0.mlp.up.weight"].view(torch.uint8).numpy().tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(weight) + 100] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        load_checkpoint(path)


def test_text_is_not_a_checkpoint(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("loss went down")
    with pytest.raises(InputError, match="not one"):
        load_checkpoint(path)


def test_missing(tmp_path):
    with pytest.raises(InputError, match=r"none\.pt: No such file"):
        load_checkpoint(tmp_path / "none.pt")


@pytest.mark.parametrize("content", [{"weight": torch.ones(2)}, [1, 2], {"format": "zofftk checkpoint 99"}])
def test_other_files_of_torch_are_told_apart(tmp_path, content):
    path = tmp_path / "other.pt"
    torch.save(content, path)
    with pytest.raises(InputError, match="expected a file marked 'zofftk checkpoint 1'"):
        load_checkpoint(path)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "evil.pt"
    torch.save({"format": "zofftk checkpoint 1", "step": Evil()}, path)
    with pytest.raises(InputError):
        load_checkpoint(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 2}, "expected a model with layers=2, the checkpoint has layers=1"),
        ({"hidden": 32}, "expected a model with hidden=32, the checkpoint has hidden=16"),
    ],
)
def test_another_model_is_refused_by_its_first_difference(checkpoint, change, message):
    other = dataclasses.replace(MODEL, **change)
    with pytest.raises(InputError, match=message):
        checkpoint.check_model(other, build_gpt(other, seed=0, dtype=torch.bfloat16))


def test_another_dtype_is_refused_by_the_first_tensor(checkpoint):
    with pytest.raises(
        InputError, match=r"blocks.0.attention.out.bias: expected torch.float32 \(16,\), .* torch.bfloat16"
    ):
        checkpoint.check_model(MODEL, build_gpt(MODEL, seed=0, dtype=torch.float32))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(path):
    before = path.read_bytes()

    def fail():
        with replacing(path) as file:
            file.write(b"half")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fail()
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
