"""Options are checked at the door."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from zofftk import OffloadConfig


def test_the_options_are_these():
    names = {field.name for field in dataclasses.fields(OffloadConfig)}
    link = {"bucket_bytes", "staging_slots", "wire_dtype", "pinned_bytes"}
    ranks = {"process_group", "rank_timeout_s", "reduce_dtype"}
    policy = {"update", "delay_after", "backwards_per_step"}
    assert names == link | policy | ranks | {"max_grad_norm", "loss_scale", "threads", "device", "trace"}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_grad_norm", 0.0),
        ("max_grad_norm", -1.0),
        ("max_grad_norm", float("nan")),
        ("max_grad_norm", True),
        ("bucket_bytes", 0),
        ("bucket_bytes", 1.5),
        ("staging_slots", 0),
        ("wire_dtype", torch.int8),
        ("reduce_dtype", torch.bfloat16),
        ("reduce_dtype", "float32"),
        ("threads", 0),
        ("pinned_bytes", -1),
    ],
)
def test_a_wrong_value_is_named(option, value):
    with pytest.raises(ValueError, match=f"{option} must be .*{str(value).replace('.', '[.]')}"):
        OffloadConfig(**{option: value})


def test_it_is_frozen_and_keyword_only():
    config = OffloadConfig(bucket_bytes=4096)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bucket_bytes = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        OffloadConfig(1.0)  # type: ignore[misc]


def test_keywords_go_before_the_config():
    config = OffloadConfig(max_grad_norm=2.0, bucket_bytes=4096)
    merged = OffloadConfig.merged(config, {"max_grad_norm": 1.0})
    assert (merged.max_grad_norm, merged.bucket_bytes) == (1.0, 4096)


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(TypeError, match=r"unknown option amsgrad: expected one of backwards_per_step, .*wire_dtype"):
        OffloadConfig.merged(None, {"amsgrad": True})
