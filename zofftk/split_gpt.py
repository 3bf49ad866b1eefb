"""The GPT with its layers cut over several ranks (tensor parallelism), as torch's DTensors.

Attention is cut by heads and the MLP by columns, then rows; between them, each rank has its own range of the sequence
(sequence parallelism). The embedding, which is the head too, is whole on every rank and used on that range alone: its
gradient is a partial sum, as are those of the norms, and the optimizer adds them up.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F

from zofftk.gpt import GPT, mean_loss


class SplitGPT(GPT):
    """Maps token ids and the next tokens, both whole on every rank, to this rank's part of their mean cross-entropy.

    The sum over the ranks of the mesh is the loss.
    """

    mesh: DeviceMesh

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        assert targets is not None
        rank, size = self.mesh.get_local_rank(), self.mesh.size()
        tokens, positions = _partial(self.tokens), _partial(self.positions)
        positions = positions[: ids.shape[1]].chunk(size)[rank]
        x = F.embedding(ids.chunk(size, 1)[rank], tokens) + positions
        normed: Any = self.norm(self.through_blocks(x))
        return mean_loss(F.linear(normed.to_local(), tokens), targets.chunk(size, 1)[rank]) / size


def _partial(embedding: nn.Embedding) -> Tensor:
    """The whole weight, whose gradient here is one of the parts that add up to it."""
    weight: Any = embedding.weight
    return weight.to_local(grad_placements=[Partial()])


def split(model: SplitGPT, mesh: DeviceMesh) -> SplitGPT:
    """Cut the model, which has the same values on all ranks, over those of `mesh`, which has one dimension."""
    model.mesh = mesh
    for embedding in (model.tokens, model.positions):
        whole = DTensor.from_local(embedding.weight.detach(), mesh, [Replicate()], run_check=False)
        embedding.weight = nn.Parameter(whole)
    plan = {
        "norm_attention": SequenceParallel(),
        "attention.qkv": ColwiseParallel(input_layouts=Shard(1)),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "norm_mlp": SequenceParallel(),
        "mlp.up": ColwiseParallel(input_layouts=Shard(1)),
        "mlp.out": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan, src_data_rank=None)  # all have the same values
    parallelize_module(model.norm, mesh, SequenceParallel(), src_data_rank=None)
    return model
