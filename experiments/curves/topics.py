"""A labelled text task that is built where it is needed: from which subpackage comes the opening of a docstring?

The texts are the first paragraphs of the docstrings in the packages that zofftk's dependencies bring. Training and test
texts come from different files.
"""

import ast
import hashlib
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zofftk.data import NOT_CORPUS
from zofftk.errors import InputError

PACKAGES = ("sympy", "torch", "networkx", "numpy", "matplotlib")
MIN_WORDS = 6  # shorter paragraphs say too little
TEST_SHARE = 0.25  # of a topic's texts, as nearly as whole files allow
MIN_FILES, MIN_TRAINING, MIN_TEST = 4, 120, 30  # of a topic
MAX_TRAINING, MAX_TEST = 160, 60  # of a topic, so that none dominates


@dataclass(frozen=True, kw_only=True)
class Split:
    """Texts and the numbers of their topics."""

    texts: list[str]
    labels: list[int]


@dataclass(frozen=True, kw_only=True)
class Topics:
    packages: tuple[str, ...]
    names: list[str]
    training: Split
    test: Split

    def describe(self) -> dict[str, Any]:
        """For the record."""
        parts = {"training": self.training, "test": self.test}
        everything = "\n".join(f"{label} {text}" for part in parts.values() for label, text in rows(part))
        return {
            "text": "first paragraphs of docstrings; which subpackage each is from",
            "versions": {package: version(package) for package in self.packages},
            "topics": self.names,
            "sha256": hashlib.sha256(everything.encode()).hexdigest(),
            "texts": {name: len(part.texts) for name, part in parts.items()},
            "commonest_topic_share": max(map(self.test.labels.count, set(self.test.labels))) / len(self.test.labels),
        }


def rows(part: Split) -> Iterator[tuple[int, str]]:
    return zip(part.labels, part.texts, strict=True)


@cache
def load_topics(packages: tuple[str, ...] = PACKAGES) -> Topics:
    """All topics of the packages that have texts enough."""
    by_topic: dict[str, dict[str, list[str]]] = {}
    for package in packages:
        by_topic |= read_package(package)
    return split_topics(by_topic, packages)


def split_topics(by_topic: dict[str, dict[str, list[str]]], packages: tuple[str, ...]) -> Topics:
    """From the texts of every file of every topic."""
    parts = {topic: split_files(files) for topic, files in sorted(by_topic.items()) if len(files) >= MIN_FILES}
    # A sentence that stands in a training file and again in a test file would be no test.
    known = {text for training, _ in parts.values() for text in training}
    chosen: dict[str, tuple[list[str], list[str]]] = {}
    for topic, (training, test) in parts.items():
        test = [text for text in test if text not in known]
        if len(training) >= MIN_TRAINING and len(test) >= MIN_TEST:
            chosen[topic] = training[:MAX_TRAINING], test[:MAX_TEST]
    if len(chosen) < 2:
        raise InputError(f"expected docstrings of at least 2 subpackages of {', '.join(packages)}, got {len(chosen)}")
    splits = []
    for part in range(2):
        labelled = [(text, label) for label, both in enumerate(chosen.values()) for text in both[part]]
        splits.append(Split(texts=[text for text, _ in labelled], labels=[label for _, label in labelled]))
    return Topics(packages=packages, names=list(chosen), training=splits[0], test=splits[1])


def split_files(files: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """Training and test texts, each once, in an order that depends on names and texts alone."""
    total = sum(map(len, files.values()))
    training: list[str] = []
    test: list[str] = []
    for file in sorted(files, key=digest):
        fits = len(test) + len(files[file]) <= TEST_SHARE * total
        (test if fits else training).extend(files[file])
    return sorted(set(training), key=digest), sorted(set(test), key=digest)


def digest(text: str) -> bytes:
    """Orders as good as at random, and the same way everywhere."""
    return hashlib.sha256(text.encode()).digest()


def read_package(package: str) -> dict[str, dict[str, list[str]]]:
    """By subpackage, by file: the first paragraphs of its docstrings."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise InputError(f"expected the package {package}, which comes with zofftk's dependencies")
    root = Path(spec.origin).parent
    found: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for file in sorted(root.rglob("*.py")):
        place = file.relative_to(root)
        if len(place.parts) > 1 and not NOT_CORPUS & set(place.parts) and (texts := read_paragraphs(file)):
            found[f"{package}.{place.parts[0]}"][place.as_posix()] = texts
    return found


def read_paragraphs(file: Path) -> list[str]:
    """The first paragraph of every docstring of a function or class that has enough words."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings, in other people's files
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # templates for other Pythons
        return []
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    paragraphs = [" ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split()) for node in nodes]
    return [paragraph for paragraph in paragraphs if len(paragraph.split()) >= MIN_WORDS]
