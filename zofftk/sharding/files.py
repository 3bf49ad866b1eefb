"""Torch's distributed checkpoint files: written with checksums; read chunk by chunk, and without running code."""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from zofftk.errors import InputError
from zofftk.sharding.manifest import NAME, FileSum

METADATA = ".metadata"
SUFFIX = ".distcp"

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},  # Python 3.13
    "collections": {"OrderedDict"},
    "torch": {"Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
}


def is_ours(name: str) -> bool:
    """Whether a folder of a distributed checkpoint may have a file of that name."""
    return name in (NAME, METADATA, f"{METADATA}.tmp") or (name.startswith("__") and name.endswith((SUFFIX, METADATA)))


def summing_writer(folder: Path) -> tuple[FileSystemWriter, dict[str, FileSum]]:
    """A writer that puts files into `folder` and onto the disk, and their checksums, by name, into the dict."""
    files = _SummingFiles()
    writer = FileSystemWriter(folder)
    writer.fs = files
    return writer, files.sums


class _SummingFiles(FileSystem):
    """Takes checksums of what goes by, so that no file is read for them."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        with super().create_stream(path, mode) as stream:
            summed = _Summed(stream)
            yield summed
            self.sums[Path(path).name] = FileSum(summed.nbytes, summed.crc32)

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _Summed:
    """A stream that is written to from beginning to end."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.nbytes = self.crc32 = 0

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.nbytes += memoryview(data).nbytes
        return self.stream.write(data)

    def tell(self) -> int:
        return self.nbytes

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        self.stream.flush()
        return self.stream.fileno()

    def close(self) -> None:
        self.stream.close()


class ChunkReader(FileSystemReader):
    """Reads each chunk of a file once, however many boxes want some of it; torch's reader reads it once for each.

    Beside what it reads into, one chunk is in memory: of a checkpoint of plain tensors, one tensor.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises InputError where the file is damaged, or would run code."""
        path = Path(self.path) / METADATA
        with path.open("rb") as file:
            try:
                metadata = _Unpickler(file).load()
            except InputError as error:
                raise InputError(f"{path}: {error}") from None
            except Exception as error:  # damaged bytes raise what they like
                raise InputError(f"{path} is damaged, or not of torch.distributed.checkpoint ({error})") from None
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise InputError(f"{path} is not of torch.distributed.checkpoint")
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise InputError(f"{path} names a file in another folder, {info.relative_path!r}")
            if getattr(info, "transform_descriptors", None):
                raise InputError(f"{path}: expected files without extensions, got {info.transform_descriptors}")
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        chunks: dict[Any, list[ReadItem]] = {}
        for item in plan.items:
            chunks.setdefault(item.storage_index, []).append(item)
        files: dict[str, list[Any]] = {}
        for index in chunks:
            files.setdefault(self.storage_data[index].relative_path, []).append(index)
        for name, indices in files.items():
            with (Path(self.path) / name).open("rb") as file:
                for index in sorted(indices, key=lambda index: self.storage_data[index].offset):
                    _deliver(self._slice_file(file, self.storage_data[index]), chunks[index], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _deliver(chunk: Any, items: list[ReadItem], planner: LoadPlanner) -> None:
    """What is in one chunk to all who want of it."""
    if items[0].type == LoadItemType.BYTE_IO:
        content = io.BytesIO(chunk.read())
        for item in items:
            content.seek(0)
            planner.load_bytes(item, content)
        return
    saved = torch.load(chunk, map_location="cpu", weights_only=True)
    for item in items:
        part = saved
        for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            part = part.narrow(dim, offset, length)
        into = planner.resolve_tensor(item).detach()
        into.copy_(part)
        planner.commit_tensor(item, into)


class _Unpickler(pickle.Unpickler):
    """Makes what is in such a file, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise InputError(f"it needs {module}.{name} to be loaded, which is not of a checkpoint's metadata")
        return super().find_class(module, name)
