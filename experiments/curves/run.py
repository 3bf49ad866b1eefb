"""What one training run is: everything its losses depend on, and its name."""

from dataclasses import asdict, dataclass
from typing import Any

from zofftk.errors import InputError

# Who updates the parameters. `plain`: the CPU kernels on whole tensors, without the engine. `torch`: torch's own AdamW
# on fp32 masters. The other two are the engine's.
UPDATES = ("plain", "torch", "synchronous", "delayed")
PAPER_DELAY_AFTER = 40  # steps after which the paper's evaluation turns the delay on
# Beside the learning rate, which is the run's. GPT-2's as `zofftk train` has them; SGD's and Lion's customary ones.
HYPER: dict[tuple[str, str], dict[str, Any]] = {
    ("gpt", "AdamW"): {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    ("gpt", "SGD"): {"momentum": 0.9},
    ("gpt", "Lion"): {"betas": (0.9, 0.99), "weight_decay": 0.1},
    ("bert", "AdamW"): {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
}
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """`model` is a name that the task knows; `delay_after` belongs to a delayed update alone."""

    experiment: str
    task: str
    model: str
    optimizer: str
    update: str
    delay_after: int | None
    lr: float
    seed: int
    steps: int
    batch_size: int
    evaluate_every: int

    def __post_init__(self) -> None:
        if (self.task, self.optimizer) not in HYPER:
            known = ", ".join(f"{optimizer} for {task}" for task, optimizer in HYPER)
            raise InputError(f"optimizer: expected one of {known}; got {self.optimizer} for {self.task}")
        if self.update not in UPDATES:
            raise InputError(f"update: expected one of {', '.join(UPDATES)}; got {self.update}")
        if (self.delay_after is None) == (self.update == "delayed"):
            raise InputError(f"delay_after: expected a number with a delayed update alone; got {self.delay_after}")
        if self.update in ("plain", "torch") and self.optimizer != "AdamW":
            raise InputError(f"optimizer: expected AdamW where no engine is; got {self.optimizer}")

    @property
    def name(self) -> str:
        """Of its files; two runs of an experiment with one name are one run."""
        delay = "" if self.delay_after is None else f"-after-{self.delay_after}"
        return f"{self.model}_{self.optimizer}_lr{self.lr:g}_{self.update}{delay}_seed{self.seed}"

    @property
    def hyper(self) -> dict[str, Any]:
        return HYPER[self.task, self.optimizer]

    @property
    def cost(self) -> tuple[str, str, str]:
        """Runs that agree in this take the same time a step."""
        return self.task, self.model, self.optimizer

    def describe(self) -> dict[str, Any]:
        """For the record; comes back the same from JSON."""
        hyper = {name: list(value) if isinstance(value, tuple) else value for name, value in self.hyper.items()}
        return asdict(self) | {"hyper": hyper, "max_grad_norm": MAX_GRAD_NORM}
