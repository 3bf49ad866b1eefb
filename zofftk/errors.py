"""Errors that are told apart by whoever catches them."""


class InputError(ValueError):
    """Says what was expected and what came, in one line; raised before any state changes."""


class StoppedError(RuntimeError):
    """A stream has failed before; the fault itself was raised then, once."""


class RankError(RuntimeError):
    """Another rank is gone, held up, or has parted from this one; the message names it."""


class RankGoneError(RankError):
    """Another rank is gone, or does not come; whoever raises it knows no more than that."""


class StoreSilentError(RankGoneError):
    """The process that holds torch.distributed's store is there, and does not answer."""
