"""A deep model from a shallow one: of layers that do the same, a few are recorded and the middle one is repeated.

What is repeated are the events. Times, the bytes that are alive and their highest point come out of them afterwards, by
going through all of them: where the highest point lies moves with the number of layers.

That layers do the same is checked on the first ones, event for event, with one layer more than what is repeated from;
of the others it is known only that they look alike (their class, and the shapes and dtypes of their parameters).
"""

from __future__ import annotations

from zofftk.virtual.events import BlockId, Event, Freed, Gradient, Part, Parts, Taken

FEW = 4  # layers: the first two and the last as they are, the third for all between them
_REPEATED = 2


class NotRepeatedError(ValueError):
    """The layers do not do the same."""


def stretch(parts: Parts, few: int, many: int) -> Parts:
    """The events of `many` layers, from those of `few`; raises NotRepeatedError where an event has lost its block."""
    stretched: Parts = {}
    for part, events in parts.items():
        if part.layer < 0:
            # What is between the passes follows the last layer, and knows the memory that one has taken.
            stretched[part] = _shifted(events, many - few if part.name == "between" else 0)
            continue
        repeats = range(many - few + 1) if part.layer == _REPEATED else range(1)
        first = 0 if part.layer <= _REPEATED else many - few
        # Backward goes down through the layers.
        for shift in reversed(repeats) if part.name == "backward" else repeats:
            stretched[part.shifted(first + shift)] = _shifted(events, first + shift)
    _check(stretched)
    return stretched


def _shifted(events: list[Event], by: int) -> list[Event]:
    return list(events) if by == 0 else [event.shifted(by) for event in events]


def _check(parts: Parts) -> None:
    """Every block is taken once and freed once, after."""
    alive: set[BlockId] = set()
    for part, events in parts.items():
        for event in events:
            if isinstance(event, Taken):
                alive.add(event.block)
            elif isinstance(event, Freed | Gradient) and event.block not in alive:
                raise NotRepeatedError(f"{part} uses {event.block}, which is not there")
            if isinstance(event, Freed):
                alive.remove(event.block)
    if alive:
        raise NotRepeatedError(f"{len(alive)} blocks are never freed, such as {next(iter(alive))}")


def order_of(num_layers: int) -> list[Part]:
    """The parts of a micro-batch, in the order they run."""
    forward = [Part("forward", layer) for layer in range(num_layers)]
    backward = [Part("backward", layer) for layer in reversed(range(num_layers))]
    return [Part("before"), *forward, Part("between"), *backward, Part("after")]


def check_repeats(few: Parts, more: Parts, num_few: int) -> None:
    """Raises NotRepeatedError unless one layer more does what the stretched events say, event for event."""
    if list(few) != order_of(num_few) or list(more) != order_of(num_few + 1):
        raise NotRepeatedError("the layers are not run one after the other, each once")
    expected = stretch(few, num_few, num_few + 1)
    for part, events in more.items():
        if events != expected[part]:
            raise NotRepeatedError(f"{part.name} of layer {part.layer} differs from that of the layer before")
