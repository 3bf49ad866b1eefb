"""What is assumed of the training that is placed: which tensors there are, and how wide."""

from dataclasses import dataclass
from fractions import Fraction

from zofftk.errors import InputError

WIDTH_BYTES = {"8bit": 1, "bf16": 2, "fp16": 2, "fp32": 4}
GRADIENTS = ("fp16", "bf16", "fp32")
STATES = ("fp32", "bf16", "fp16", "8bit")
MASTERS = ("fp32", "none")
# The optimizer's own states, one letter each, as node names begin.
OPTIMIZERS = {"adam": "mv", "lion": "m", "sgd-momentum": "m", "sgd": ""}
FINEST_SPLIT = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """One way to train with 16-bit parameters; the defaults are those of the ZeRO-Offload paper, section 3.

    Raises InputError for what is not one of the names above, and for a split that leaves one side empty.
    """

    gradients: str = "fp16"
    optimizer: str = "adam"
    # Of the optimizer's states beside the master parameters. Scales of 8-bit blocks are not counted.
    states: str = "fp32"
    master: str = "fp32"  # none: the update reads and writes the 16-bit parameters
    # Fraction of the parameters whose own nodes are placed apart from those of the rest; rounded to a millionth.
    split: Fraction | float | None = None

    def __post_init__(self) -> None:
        _expect_one_of("gradients", GRADIENTS, self.gradients)
        _expect_one_of("optimizer", tuple(OPTIMIZERS), self.optimizer)
        _expect_one_of("states", STATES, self.states)
        _expect_one_of("master", MASTERS, self.master)
        if self.split is not None:
            smallest = Fraction(1, FINEST_SPLIT)
            # Written so that NaN is refused too.
            if not smallest <= self.split <= 1 - smallest:
                expected = f"a number from {float(smallest):f} to {float(1 - smallest):f}"
                raise InputError(f"split: expected {expected}, got {_shown(self.split)}")

    def parts(self) -> tuple[tuple[str, Fraction], ...]:
        """Ending of the node names and share of all parameters, for each part that is placed on its own."""
        if self.split is None:
            return (("", Fraction(1)),)
        share = Fraction(self.split).limit_denominator(FINEST_SPLIT)
        return ((".part", share), (".rest", 1 - share))


def _expect_one_of(name: str, choices: tuple[str, ...], got: object) -> None:
    if got not in choices:
        raise InputError(f"{name}: expected one of {', '.join(choices)}, got {got}")


def _shown(value: Fraction | float) -> str:
    return f"{float(value):g}"


PAPER = Assumptions()
