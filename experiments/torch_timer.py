"""Seconds of device work, competitors in turns, with the caches flushed before each."""

import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 << 20


class DeviceTimer:
    """CUDA events around each call on a GPU; the host's clock on the CPU."""

    def __init__(self, device: torch.device, repeats: int = 15) -> None:
        self._repeats = repeats
        self._cuda = device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES if self._cuda else 1 << 20, dtype=torch.uint8, device=device)

    def in_turns(self, functions: dict[str, Callable[[], object]], *, on_host: bool = False) -> dict[str, list[float]]:
        """Samples of each function, after one round that is not counted. `on_host`: the host's clock, to the end of
        the work, for functions that wait themselves."""
        samples: dict[str, list[float]] = {name: [] for name in functions}
        for repeat in range(self._repeats + 1):
            for name, function in functions.items():
                self._flush.zero_()
                self._synchronize()
                seconds = self._by_host(function) if on_host or not self._cuda else self._by_events(function)
                if repeat:
                    samples[name].append(seconds)
        return samples

    def _by_host(self, function: Callable[[], object]) -> float:
        began = time.perf_counter()
        function()
        self._synchronize()
        return time.perf_counter() - began

    def _by_events(self, function: Callable[[], object]) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Work that keeps the device busy while the host enqueues, so that launches are not what is timed.
        torch.cuda._sleep(2_000_000)
        start.record()
        function()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
