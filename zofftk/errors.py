"""The one error that means: what the user gave cannot be used."""


class InputError(ValueError):
    """Says what was expected and what came, in one line; raised before any state changes."""
