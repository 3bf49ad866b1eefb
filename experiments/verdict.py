"""What an experiment says of a figure that it requires."""


def verdict(met: bool, *, timed: bool = True) -> str:
    """`timed`: the figure is a time or a ratio of times, which another program on the machine can spoil."""
    if met:
        return "met"
    return "missed: noise on a busy machine can do this, run it again when it is quiet" if timed else "missed"
