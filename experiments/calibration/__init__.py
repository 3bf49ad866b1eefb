"""The free numbers of the predicted figures, and their fit on a few bars: `python -m experiments calibration`."""

from experiments.calibration.command import add_arguments, run

__all__ = ["add_arguments", "run"]
