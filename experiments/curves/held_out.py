"""The standard library's source in two parts: what a language model learns from, and what it never sees.

A top-level module or package is held out as a whole, since files of one package resemble each other.
"""

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from zofftk.data import Corpus, load_parts, read_stdlib_files

ONE_IN = 16  # modules of this many are held out
TABLES = "encodings"  # a package of code tables, more than a tenth of the source, and hardly text


@cache
def load_split(vocab: int) -> tuple[Corpus, Corpus, dict[str, Any]]:
    """Training tokens, held-out tokens in the same vocabulary, and what they are made of, for the record."""
    files = {file: text for file, text in read_stdlib_files().items() if file.parts[0] != TABLES}
    parts = [[file for file in files if is_held_out(file) == held] for held in (False, True)]
    texts = ["\n".join(files[file] for file in part) for part in parts]
    training, held_out = load_parts(texts, vocab=vocab)
    data: dict[str, Any] = {"text": "source of Python's standard library without its code tables", "vocab": vocab}
    for name, part, text, corpus in zip(("training", "held_out"), parts, texts, (training, held_out), strict=True):
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        data[name] = {"sha256": sha256, "files": len(part), "characters": len(text), "tokens": len(corpus.tokens)}
    return training, held_out, data


def is_held_out(file: Path) -> bool:
    """By a hash of the module's name, so that a file added elsewhere moves nothing."""
    module = file.parts[0].removesuffix(".py")
    return int(hashlib.sha256(module.encode()).hexdigest(), 16) % ONE_IN == 0
