"""A small language model, cut over ranks as torch's tensor parallelism does it, and what one rank makes of it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F

WORDS, WIDTH, HIDDEN, LENGTH = 25, 16, 33, 8  # sizes that two ranks do not share evenly


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.temperature = nn.Parameter(torch.ones(3))  # stays a plain parameter

    def forward(self, words):
        return self.head(self.norm(self.blocks(self.embed(words)))) * self.temperature.mean()


def tied(model):
    model.head.weight = model.embed.weight
    return model


def build(dtype=torch.float32, mesh=None):
    """Tied; the same values on every rank; cut over `mesh`."""
    torch.manual_seed(0)
    model = Model().to(dtype)
    nn.init.normal_(model.embed.weight, std=0.3)
    return tied(model if mesh is None else cut(model, mesh))


def cut(model, mesh):
    sequence = Shard(1)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=sequence, output_layouts=Replicate()),
    }
    for block in ("blocks.0", "blocks.1"):
        plan[f"{block}.norm"] = SequenceParallel(use_local_output=True)
        plan[f"{block}.up"] = ColwiseParallel(input_layouts=sequence, use_local_output=False)  # else the sizes must fit
        plan[f"{block}.down"] = RowwiseParallel(output_layouts=sequence)
    return parallelize_module(model, mesh, plan)


def mesh_of_sizes(data, tensor):
    return init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))


def words(number, batch=4):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, WORDS, (batch, LENGTH + 1), generator=generator)


def backward(model, opt, number, part=0, parts=1, micro=1):
    """Of this rank's part of a batch; returns the part's loss."""
    own = words(number).chunk(parts)[part]
    logits = model(own[:, :-1]).float()
    loss = F.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten()) / micro
    opt.scale_loss(loss).backward()
    return loss.detach()


def train(model, opt, steps, mesh=None, micro=1, first=0):
    """Losses of whole batches."""
    part, parts = (0, 1) if mesh is None else (mesh["dp"].get_local_rank(), mesh["dp"].size())
    losses = []
    for step in range(first, first + steps):
        total = sum(backward(model, opt, step * micro + i, part, parts, micro) for i in range(micro))
        if mesh is not None:
            dist.all_reduce(total, group=mesh["dp"].get_group())
        opt.step()
        opt.zero_grad()
        losses.append(float(total) / parts)
    return losses


def whole(value):
    """A collective, of DTensors."""
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def of_each_rank(value):
    """On all ranks."""
    others = [None] * dist.get_world_size()
    dist.all_gather_object(others, value)
    return others


def same_everywhere(tensors):
    """What every rank has in its memory of these."""
    flat = torch.cat([t.detach().reshape(-1).view(torch.uint8) for t in tensors])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    return all(torch.equal(other, flat) for other in others)


def uncut(model):
    """The memory of parameters that every rank has all of."""
    params = [p for p in model.parameters() if all(not s.is_shard() for s in getattr(p, "placements", ()))]
    return [getattr(p, "_local_tensor", p) for p in params]
