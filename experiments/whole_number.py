"""A kind of option: numbers of repetitions, sizes and the like."""

import argparse


def at_least_1(text: str) -> int:
    """Raises what argparse shows beside the option's name."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return number
