"""A saved run on its way to the next process, by one of the ways a user may choose."""

from __future__ import annotations

import copy
import io
import tempfile
from pathlib import Path
from typing import Any

import torch

import zofftk


class RunFile:
    """Keeps nothing of `content` itself."""

    def __init__(self, how: str, content: dict[str, Any]) -> None:
        self._how = how
        self._content: Any = copy.deepcopy(content) if how == "direct" else None
        self._bytes = b""
        if how == "torch":
            file = io.BytesIO()
            torch.save(content, file)
            self._bytes = file.getvalue()
        elif how == "zofftk":
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "run.pt"
                zofftk.save(path, content)
                self._bytes = path.read_bytes()

    def load(self) -> dict[str, Any]:
        if self._how == "direct":
            return self._content
        if self._how == "torch":
            return torch.load(io.BytesIO(self._bytes), weights_only=True)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.pt"
            path.write_bytes(self._bytes)
            return zofftk.load(path)  # which maps the file: it outlives its name
