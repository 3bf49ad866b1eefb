"""Hugging Face `Trainer`: which optimizer it builds. Nothing else of it needs us, so nothing of it is imported."""

from __future__ import annotations

from typing import Any

from zofftk.offload_adam import OffloadAdamW


def offload_optimizer(args: Any, **options: Any) -> tuple[type[OffloadAdamW], dict[str, Any]]:
    """What `Trainer(optimizer_cls_and_kwargs=...)` takes, with the learning rate, betas and eps of its arguments.

    The trainer makes the groups (weight decay on all but biases and norms) and does not pass its learning rate on to
    a class it is given: `(OffloadAdamW, {})` would train with our default. It clips to `max_grad_norm` by itself, so
    leave that option of ours alone.

    Args:
        args: the `transformers.TrainingArguments` of the trainer; its `optim` no longer matters.
        **options: keywords of `OffloadAdamW` that go before what `args` says.

    Source: `Trainer.create_optimizer` and `Trainer.get_optimizer_cls_and_kwargs` of transformers.
    """
    hypers = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return OffloadAdamW, {**hypers, **options}
