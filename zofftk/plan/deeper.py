"""The memory of a deep model out of that of two shallow ones.

Each part of a micro-batch has a highest point of its own: forward of the first layer and of the last, backward of the
last and of the first, what comes before, between and after. As layers are added, what is alive where a part begins
grows along a straight line, and what comes in it stays the same. The highest point of a deep model is the highest of
its parts. It may be another than in a shallow one, so the lines are continued first and compared afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zofftk.plan.memory import ACTIVATIONS, GRADIENTS, Memory, MemoryList
from zofftk.virtual.device_memory import DeviceMemory, Peak
from zofftk.virtual.events import Part

ENDS = 3  # layers at each end of the stack; those between lie between them

Place = tuple[int, str, int]  # micro-batch, part, and its layer: counted from the end where it is below 0


@dataclass(frozen=True)
class Shallow:
    """A model of so many layers: its memory, and its highest points by their place."""

    layers: int  # 0: not asked for
    memory: Memory
    peaks: dict[Place, Peak]


def peaks_of(line: DeviceMemory, layers: int) -> dict[Place, Peak]:
    found: dict[Place, Peak] = {}
    micro_batch = 0
    for (_, part), peak in zip(line.stages, line.peaks()[1:], strict=True):
        assert isinstance(part, Part)
        micro_batch += part.name == "before"
        from_end = part.layer - layers
        layer = part.layer if part.layer < ENDS else from_end
        if part.layer < 0 or part.layer < ENDS or from_end >= -ENDS:
            found[micro_batch, part.name, 0 if part.layer < 0 else layer] = peak
    return found


def deeper(few: Shallow, more: Shallow, layers: int) -> Memory:
    """Of a model of so many layers."""
    times = (layers - few.layers) / (more.layers - few.layers)

    def continued(first: int, second: int) -> int:
        return round(first + (second - first) * times)

    def along(first: MemoryList, second: MemoryList) -> MemoryList:
        names = dict.fromkeys((*first.items, *second.items))
        items = {name: continued(first.items.get(name, 0), second.items.get(name, 0)) for name in names}
        return replace(first, items=items, locked_bytes=continued(first.locked_bytes, second.locked_bytes))

    def at(first: Peak, second: Peak) -> tuple[int, int]:
        """Activations and gradients. What is there when a part begins grows; what comes in it does not."""
        comes = second.activations_bytes - second.began_bytes
        return continued(first.began_bytes, second.began_bytes) + comes, second.gradients_bytes

    both = [(peak, more.peaks[place]) for place, peak in few.peaks.items() if place in more.peaks]
    highest = max((at(first, second) for first, second in both), key=sum)
    device = along(few.memory.device, more.memory.device)
    items = {**device.items, ACTIVATIONS: highest[0], GRADIENTS: highest[1]}
    device = replace(device, items={name: nbytes for name, nbytes in items.items() if nbytes})
    host = along(few.memory.host, more.memory.host)
    num_params = continued(few.memory.num_params, more.memory.num_params)
    return Memory(device, host, num_params, few.memory.devices_in_host)
