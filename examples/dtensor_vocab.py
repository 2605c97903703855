"""DTensors with a sharded vocabulary: the shard of this rank, for computations on the local tensor.

Copy this file beside your script: ``from dtensor_vocab import vocab_of``.
Every primitive takes DTensors that are replicated or sharded by rows. For a sharded vocabulary give the local tensor::

    from_logits(logits.to_local(), token_ids, vocab=vocab_of(logits))
    from_hidden(hidden, head_weight.to_local(), token_ids, vocab=vocab_of(head_weight, dim=0))
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rlprims.types import VocabShard


def vocab_of(x: DTensor, dim: int = -1) -> VocabShard:
    """The shard of the vocabulary in ``x.to_local()``, of logits (..., V), or with ``dim=0`` of a head (V, H).

    Exactly one dimension of the mesh must shard ``dim``. The others may replicate, or shard the rows of logits.

    Args:
        x: a DTensor with ``Shard(dim)``.
        dim: the dimension of the vocabulary.

    Returns:
        a VocabShard whose sums are over the ranks of that dimension of the mesh.

    Raises:
        TypeError: x is not a DTensor.
        ValueError: the placements do not shard ``dim`` once and evenly, or one is partial.
    """
    if not isinstance(x, DTensor):
        raise TypeError(f"x is a {type(x).__name__}, expected a DTensor with a sharded vocabulary")
    dim = dim % x.ndim
    mesh_dims = [i for i, placement in enumerate(x.placements) if placement.is_shard(dim)]
    if len(mesh_dims) != 1 or any(placement.is_partial() for placement in x.placements):
        raise ValueError(
            f"x has placements {x.placements}, expected Shard({dim}) in one dimension of the mesh and no Partial: "
            f"{'replicated logits need no vocab' if not mesh_dims else 'redistribute it'}"
        )
    (mesh_dim,) = mesh_dims
    if type(x.placements[mesh_dim]) is not Shard:
        raise ValueError(f"x has placement {x.placements[mesh_dim]!r}, expected Shard({dim}): contiguous columns")
    size, ranks = x.shape[dim], x.device_mesh.size(mesh_dim)
    start = min(-(-size // ranks) * x.device_mesh.get_local_rank(mesh_dim), size)  # as torch.chunk splits
    group = x.device_mesh.get_group(mesh_dim)
    return VocabShard(start, size, _reduction(group, dist.ReduceOp.SUM), _reduction(group, dist.ReduceOp.MAX))


def _reduction(group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType) -> Callable[[Tensor], Tensor]:
    @torch.no_grad()
    def reduce(x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, operation, group=group)
        return x

    return reduce
