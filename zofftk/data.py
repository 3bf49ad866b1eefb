"""Training text as token ids: the source of Python's standard library, or the user's own files.

A vocabulary of 256 is the bytes themselves; a larger one is a byte-pair encoding trained on the text. Batches are a
pure function of (seed, step), so a resumed run sees what the uninterrupted one would have seen.
"""

import contextlib
import hashlib
import io
import os
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zofftk.atomic_file import replacing
from zofftk.errors import InputError

# Characters of the text from which merges are learnt; more changes the vocabulary little.
TOKENIZER_SAMPLE_CHARS = 8_000_000
# Left out everywhere, since many distributions do not install them.
NOT_CORPUS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Token ids of the whole text; `fingerprint` names their content."""

    tokens: np.ndarray
    vocab: int
    fingerprint: str

    def batch(self, *, seed: int, step: int, batch_size: int, seq: int) -> tuple[Tensor, Tensor]:
        """Ids and next ids, each (batch_size, seq), from places drawn at random for this seed and step."""
        starts = np.random.default_rng((seed, step)).integers(len(self.tokens) - seq, size=batch_size)
        windows = np.stack([self.tokens[start : start + seq + 1] for start in starts]).astype(np.int64)
        ids = torch.from_numpy(windows)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def load_corpus(files: Sequence[Path] | None, *, vocab: int, seq: int) -> Corpus:
    """The tokens of `files`, one after the other, or of the standard library where `files` is None."""
    text = _read_stdlib() if files is None else "\n".join(_read_text(file) for file in files)
    fingerprint = hashlib.sha256(f"{vocab}\n{text}".encode()).hexdigest()
    tokens = _encode_bytes(text) if vocab == 256 else _encode_pieces(text, vocab, fingerprint)
    if len(tokens) <= seq:
        source = "the standard library" if files is None else ", ".join(map(str, files))
        raise InputError(f"data: expected more than {seq} tokens for sequences of {seq}; {source} gave {len(tokens)}")
    return Corpus(tokens=tokens, vocab=vocab, fingerprint=fingerprint)


def load_parts(texts: Sequence[str], *, vocab: int) -> list[Corpus]:
    """The tokens of each text, in a vocabulary that is learnt from the first alone."""
    parts = []
    for text in texts:
        fingerprint = hashlib.sha256(f"{vocab}\n{texts[0]}\n{text}".encode()).hexdigest()
        tokens = _encode_bytes(text) if vocab == 256 else _encode_pieces(text, vocab, fingerprint, learnt_from=texts[0])
        parts.append(Corpus(tokens=tokens, vocab=vocab, fingerprint=fingerprint))
    return parts


def _read_text(file: Path) -> str:
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise InputError(f"data: expected a readable text file; {file}: {error.strerror}") from None
    if not raw.strip():
        raise InputError(f"data: expected text; {file} is empty")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"data: expected UTF-8 text; {file} is not, at byte {error.start}") from None
    if "\0" in text:
        raise InputError(f"data: expected text; {file} holds a NUL, at character {text.index(chr(0))}")
    return text


def _read_stdlib() -> str:
    return "\n".join(read_stdlib_files().values())


def read_stdlib_files() -> dict[Path, str]:
    """The text of every source file, by its place in the library's folder, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(root.rglob("*.py")) if not NOT_CORPUS & set(file.relative_to(root).parts)]
    if not files:
        raise InputError(f"data: expected the standard library's source; {root} holds no .py files, so name --data")
    # A few of its files are deliberately in other encodings.
    return {
        file.relative_to(root): file.read_bytes().decode("utf-8", errors="replace").replace("\0", "") for file in files
    }


def _encode_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _encode_pieces(text: str, vocab: int, fingerprint: str, *, learnt_from: str | None = None) -> np.ndarray:
    """Ids of a byte-pair encoding trained on `text`, or on another, from the cache where it has been encoded before."""
    sentencepiece = _import_sentencepiece()
    key = hashlib.sha256(f"{fingerprint} sentencepiece {sentencepiece.__version__}".encode()).hexdigest()[:32]
    cached = cache_dir() / f"tokens-{key}.npy"
    # A damaged file is replaced like a missing one.
    with contextlib.suppress(OSError, ValueError, EOFError):
        return np.load(cached, mmap_mode="r")
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=_train_tokenizer(learnt_from or text, vocab))
    lines = text.splitlines(keepends=True)
    ids = np.concatenate([np.asarray(piece, dtype=np.uint16) for piece in tokenizer.encode(lines)])
    # Where the cache cannot be written, the next run encodes again.
    with contextlib.suppress(OSError), replacing(cached) as file:
        np.save(file, ids)
    return ids


def _train_tokenizer(text: str, vocab: int) -> bytes:
    """A model that gives every text back: nothing is normalised, and what has no piece is spelt in bytes."""
    model = io.BytesIO()
    try:
        _import_sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=iter(text[:TOKENIZER_SAMPLE_CHARS].split("\n")),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab,
            hard_vocab_limit=False,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"],
            max_sentence_length=1 << 16,
            bos_id=-1,
            eos_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = " ".join(str(error).rpartition("] ")[2].split())
        raise InputError(f"data: expected text that a vocabulary of {vocab} can hold; {reason}") from None
    return model.getvalue()


def _import_sentencepiece():
    with warnings.catch_warnings():
        # Its generated wrapper types warn on newer Pythons; nothing a user could act on.
        warnings.simplefilter("ignore", DeprecationWarning)
        import sentencepiece
    return sentencepiece


def cache_dir() -> Path:
    """Where encoded texts are kept between runs; safe to delete."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "zofftk"
