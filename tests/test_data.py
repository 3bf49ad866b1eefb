import os
from pathlib import Path

import numpy as np
import pytest
import torch

from zofftk.data import NOT_CORPUS, cache_dir, load_corpus
from zofftk.errors import InputError

TEXT = "def add(a, b):\n    return a + b\n\n" * 40


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def text_file(tmp_path) -> Path:
    path = tmp_path / "text.py"
    path.write_text(TEXT)
    return path


def test_bytes_are_the_tokens_of_a_256_vocabulary(text_file):
    corpus = load_corpus([text_file], vocab=256, seq=8)
    assert bytes(corpus.tokens) == TEXT.encode()


def test_pieces_come_from_the_cache_the_second_time(text_file):
    fresh = load_corpus([text_file], vocab=300, seq=8)
    (cached_file,) = cache_dir().iterdir()
    cached = load_corpus([text_file], vocab=300, seq=8)
    assert isinstance(cached.tokens, np.memmap)
    assert np.array_equal(fresh.tokens, cached.tokens)
    assert fresh.tokens.max() < 300
    assert len(fresh.tokens) < len(TEXT) / 2
    cached_file.write_bytes(cached_file.read_bytes()[:50])
    assert np.array_equal(load_corpus([text_file], vocab=300, seq=8).tokens, fresh.tokens)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written_is_done_without(text_file, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o500)
    assert len(load_corpus([text_file], vocab=300, seq=8).tokens) > 8


def test_the_fingerprint_names_text_and_vocabulary(text_file, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(TEXT + "x")
    prints = {
        load_corpus([file], vocab=vocab, seq=8).fingerprint for file in (text_file, other) for vocab in (256, 300)
    }
    assert len(prints) == 4


def test_batches_depend_on_seed_and_step_alone(text_file):
    corpus = load_corpus([text_file], vocab=256, seq=8)

    def batch(seed, step):
        return corpus.batch(seed=seed, step=step, batch_size=4, seq=8)

    ids, targets = batch(0, 5)
    assert ids.shape == targets.shape == (4, 8)
    assert ids.dtype == torch.int64
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    batch(0, 6)
    assert torch.equal(ids, batch(0, 5)[0])
    assert not torch.equal(ids, batch(0, 6)[0])
    assert not torch.equal(ids, batch(1, 5)[0])
    for row, target in zip(ids, targets, strict=True):
        assert bytes(row.tolist() + target[-1:].tolist()).decode() in TEXT


def test_every_place_of_a_short_text_is_drawn(tmp_path):
    path = tmp_path / "short"
    path.write_text("abcdefghij")
    corpus = load_corpus([path], vocab=256, seq=8)
    starts = {corpus.batch(seed=0, step=step, batch_size=1, seq=8)[0][0, 0].item() for step in range(50)}
    assert starts == set(b"ab")


def test_the_standard_library_is_the_default_text():
    corpus = load_corpus(None, vocab=256, seq=64)
    assert len(corpus.tokens) > 1_000_000
    assert b"class OrderedDict" in bytes(corpus.tokens)
    assert "site-packages" in NOT_CORPUS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"text \xff text", "expected UTF-8 text; .* is not, at byte 5"),
        (b"text\0text", "holds a NUL, at character 4"),
        (b"few", "expected more than 8 tokens for sequences of 8; .* gave 3"),
    ],
)
def test_unusable_files_are_named(tmp_path, content, message):
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message) as raised:
        load_corpus([path], vocab=256, seq=8)
    assert str(path) in str(raised.value)


def test_a_folder_is_not_a_file(tmp_path):
    with pytest.raises(InputError, match="Is a directory"):
        load_corpus([tmp_path], vocab=256, seq=8)


def test_more_characters_than_the_vocabulary_holds(tmp_path):
    path = tmp_path / "wide.txt"
    path.write_text("".join(map(chr, range(0x4E00, 0x4E00 + 400))))
    with pytest.raises(InputError, match="expected text that a vocabulary of 300 can hold"):
        load_corpus([path], vocab=300, seq=8)
