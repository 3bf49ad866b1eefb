"""A kind of option of commands: numbers of repetitions, sizes and the like."""

import argparse


def at_least_1(text: str) -> int:
    """Raises what argparse shows beside the option's name."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text}")
    return int(text)
