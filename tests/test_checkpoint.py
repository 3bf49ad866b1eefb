import dataclasses
import errno
import io
import os
import random
import zipfile

import pytest
import torch

from zofftk.atomic_file import replacing
from zofftk.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from zofftk.errors import InputError
from zofftk.gpt import build_gpt
from zofftk.gpt_config import GPTConfig

RANDOM = random.Random(0)
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


def test_no_flipped_byte_changes_what_is_loaded(path, checkpoint):
    good = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        directory = archive.start_dir
    for turn in range(60):
        content = bytearray(good)
        begin = directory if turn % 2 else 0
        content[RANDOM.randrange(begin, len(content))] ^= RANDOM.randrange(1, 256)
        path.write_bytes(content)
        try:
            loaded = load_checkpoint(path)
        except InputError:
            continue
        assert repr(vars(loaded)) == repr(vars(checkpoint))
        assert all(torch.equal(loaded.model[name], tensor) for name, tensor in checkpoint.model.items())


def test_bytes_that_say_they_are_compressed(path):
    """The zip directory's compression method, which makes the reader raise an error of the decompressor."""
    with zipfile.ZipFile(path) as archive:
        directory, first = archive.start_dir, archive.infolist()[0]
    content = bytearray(path.read_bytes())
    content[directory + 10] = zipfile.ZIP_DEFLATED
    content[first.header_offset + 8] = zipfile.ZIP_DEFLATED
    path.write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        load_checkpoint(path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="expected a checkpoint; .*pipe: it is not a file"):
        load_checkpoint(tmp_path / "pipe")


def test_a_full_disk_says_so_and_names_the_file(path, checkpoint, monkeypatch):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr("zofftk.atomic_file.os.fdopen", lambda descriptor, mode: os.close(descriptor) or Full())
    with pytest.raises(OSError, match=r"No space left on device: '.*checkpoint\.pt'"):
        save_checkpoint(path, checkpoint)
    assert path.read_bytes() == before


def test_a_symbolic_link_is_followed_also_to_nothing_yet(tmp_path, checkpoint):
    link, target = tmp_path / "link.pt", tmp_path / "there" / "target.pt"
    link.symlink_to(target)
    for step in (3, 4):
        save_checkpoint(link, dataclasses.replace(checkpoint, step=step))
        assert link.is_symlink()
        assert not target.is_symlink()
        assert load_checkpoint(target).step == step


def test_nothing_but_a_file_is_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="expected a file, it is a named pipe"), replacing(tmp_path / "pipe"):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["pipe"]


def test_a_name_as_long_as_the_file_system_allows(tmp_path, checkpoint):
    save_checkpoint(tmp_path / ("n" * 255), checkpoint)


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
    with pytest.raises(InputError, match="expected a file marked 'zofftk checkpoint 2'"):
        load_checkpoint(path)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "evil.pt"
    torch.save({"format": "zofftk checkpoint 2", "step": Evil()}, path)
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
