"""Dry runs of a model that tensor parallelism cuts, on a mesh of devices that are not there."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from zofftk.gpt import GPT
from zofftk.gpt_config import GPTConfig
from zofftk.profile import load_profile
from zofftk.split_gpt import SplitGPT, split
from zofftk.virtual.dry_run import dry_run
from zofftk.virtual.durations import Durations
from zofftk.virtual.mesh import virtual_mesh

V100 = load_profile("v100-dgx2")
CONFIG = GPTConfig(layers=7, hidden=64, heads=4, vocab=256, seq=32, recompute=True)


def loss(model):
    ids = torch.zeros(4, CONFIG.seq, dtype=torch.long)
    return model(ids, ids)


def run(mesh, **options):
    return dry_run(lambda: split(SplitGPT(CONFIG), mesh), loss, V100, slices=mesh.size(), keep_spans=True, **options)


@pytest.mark.parametrize("options", [{}, {"ranks": 2, "update": "delayed", "backwards": 2}], ids=["one", "ranks"])
def test_a_few_layers_continued_are_all_of_them(options):
    with virtual_mesh(4) as mesh:
        stretched, full = (run(mesh, in_full=in_full, **options) for in_full in (False, True))
    assert (stretched.is_stretched, full.is_stretched) == (True, False)
    assert list(stretched.trace.spans) == list(full.trace.spans)
    for field in dataclasses.fields(full):
        if field.name not in ("trace", "is_stretched"):
            assert getattr(stretched, field.name) == getattr(full, field.name), field.name


def test_each_device_has_its_slices_and_what_is_whole():
    with virtual_mesh(4) as mesh:
        sliced = run(mesh)
    whole = dry_run(lambda: GPT(CONFIG), loss, V100)
    hidden, kept = CONFIG.hidden, (CONFIG.vocab + CONFIG.seq + 2) * CONFIG.hidden
    kept += CONFIG.layers * 6 * hidden  # the norms, and the biases of what is cut by rows
    assert sliced.num_params == kept + (CONFIG.num_params - kept) // 4
    assert sliced.step.flops == pytest.approx(whole.step.flops / 4, rel=1e-6)
    assert sliced.host_bytes == pytest.approx(14 * sliced.num_params, rel=0.02)
    assert sliced.step.ns > whole.step.ns / 4


def test_a_slice_too_many_is_told():
    with virtual_mesh(4) as mesh, pytest.raises(ValueError, match="slices is 2, expected 4: the devices of the model"):
        dry_run(lambda: split(SplitGPT(CONFIG), mesh), loss, V100, slices=2)
    with pytest.raises(ValueError, match="slices is 2, expected 1"):
        dry_run(lambda: GPT(CONFIG), loss, V100, slices=2)


def test_a_mesh_needs_torch_distributed_to_itself():
    with virtual_mesh(2), pytest.raises(RuntimeError, match="expected it not to be initialised"), virtual_mesh(2):
        pass
    assert not dist.is_initialized()


def test_slices_share_what_lies_between_hosts():
    within, between = Durations(V100, ranks=2, slices=8), Durations(V100, ranks=4, slices=8)
    assert [each.ranks_here for each in (within, between)] == [16, 16]
    nbytes, ring_ns = 960_000_000, 20e3
    assert within.slices_ns(nbytes) == between.slices_ns(nbytes) == pytest.approx(nbytes * 7 / 8 / 120 + 7 * ring_ns)
    assert within.collective_ns(nbytes, 2) == pytest.approx(nbytes / 2 / 120 + ring_ns)
    assert between.collective_ns(nbytes, 4) == pytest.approx(nbytes * 3 / 4 / (80 / 8) + 3 * ring_ns)
