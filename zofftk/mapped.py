"""Copies out of mapped files that do not let the file pile up in this process's memory."""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from pathlib import Path

import torch

CHUNK_BYTES = 8 << 20  # what of the file is in memory beside the copy
AROUND_BYTES = 64 << 10  # Linux maps so much of a file around an address that is read
# Of linux/mman.h. Unlike MADV_DONTNEED it loses nothing: pages that somebody has written to stay.
_MADV_PAGEOUT = 21


class FileMappings:
    """Which of this process's addresses were those of mapped files when this was made."""

    def __init__(self, maps: Path = Path("/proc/self/maps")) -> None:
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # not Linux: plain copies
            lines = []
        ranges = [line.split(maxsplit=5) for line in lines]
        files = [entry[0].split("-") for entry in ranges if len(entry) == 6 and entry[5].startswith("/")]
        self._ranges = sorted((int(start, 16), int(stop, 16)) for start, stop in files)
        self._read: list[tuple[int, int]] = []  # addresses that have been read since the kernel was last told ...
        self._read_bytes = 0  # ... and how many

    def _holds(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return False
        number = bisect_right(self._ranges, (tensor.data_ptr(), 1 << 64)) - 1
        return number >= 0 and tensor.data_ptr() < self._ranges[number][1]

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """`into.copy_(source)`; where the source is mapped, what was read of it need not stay in memory."""
        if not self._holds(source) or not into.is_contiguous():
            into.copy_(source)
            return
        into, source = into.view(-1), source.detach().view(-1)
        step = CHUNK_BYTES // source.dtype.itemsize
        for start in range(0, source.numel(), step):
            part = source[start : start + step]
            into[start : start + step].copy_(part)
            self._read.append((part.data_ptr(), part.data_ptr() + part.numel() * part.dtype.itemsize))
            self._read_bytes += part.numel() * part.dtype.itemsize
            if self._read_bytes >= CHUNK_BYTES:
                self.release()

    def release(self) -> None:
        """Tell the kernel that it may drop what was read; together, since it reads around what was asked for."""
        if self._read:
            start, stop = min(start for start, _ in self._read), max(stop for _, stop in self._read)
            number = bisect_right(self._ranges, (start, 1 << 64)) - 1
            start = max(start - AROUND_BYTES, self._ranges[number][0]) // mmap.PAGESIZE * mmap.PAGESIZE
            stop = min(stop + AROUND_BYTES, self._ranges[number][1])
            # A hint: kernels before 5.4 refuse it, which changes nothing.
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_PAGEOUT)
            self._read.clear()
            self._read_bytes = 0


_libc = ctypes.CDLL(None)
