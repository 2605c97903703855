"""DTensors whose vocabulary is cut: which part this rank has, so that formulas compute on the local tensor.

DTensors that are replicated, or cut by rows, go into every primitive as they are. Where a DTensor cuts the vocabulary,
give the local tensor and ``vocab``::

    from_logits(logits.to_local(), token_ids, vocab=vocab_of(logits))
    from_hidden(hidden, head_weight.to_local(), token_ids, vocab=vocab_of(head_weight, dim=0))
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rlprims.types import VocabShard

__all__ = ["vocab_of"]


def vocab_of(x: DTensor, dim: int = -1) -> VocabShard:
    """The shard of the vocabulary that ``x.to_local()`` is: of logits (..., V), or with ``dim=0`` of a head (V, H).

    Exactly one dimension of the mesh cuts ``dim``. The others may replicate, or cut the rows of logits.

    Args:
        x: a DTensor with ``Shard(dim)``.
        dim: which dimension of it is the vocabulary.

    Returns:
        a VocabShard whose sums are over the ranks of that dimension of the mesh.

    Raises:
        TypeError: x is no DTensor.
        ValueError: the placements do not cut ``dim`` once and evenly, or one is partial.
    """
    if not isinstance(x, DTensor):
        raise TypeError(f"x is a {type(x).__name__}, expected a DTensor whose vocabulary is cut")
    dim = dim % x.ndim
    cutting = [i for i, placement in enumerate(x.placements) if placement.is_shard(dim)]
    if len(cutting) != 1 or any(placement.is_partial() for placement in x.placements):
        raise ValueError(
            f"x has placements {x.placements}, expected Shard({dim}) in one dimension of the mesh and no Partial: "
            f"{'replicated logits need no vocab' if not cutting else 'redistribute it'}"
        )
    (mesh_dim,) = cutting
    if type(x.placements[mesh_dim]) is not Shard:
        raise ValueError(f"x has placement {x.placements[mesh_dim]!r}, expected Shard({dim}): contiguous columns")
    size, ranks = x.shape[dim], x.device_mesh.size(mesh_dim)
    start = min(-(-size // ranks) * x.device_mesh.get_local_rank(mesh_dim), size)  # as torch.chunk cuts
    group = x.device_mesh.get_group(mesh_dim)
    return VocabShard(start, size, _reduction(group, dist.ReduceOp.SUM), _reduction(group, dist.ReduceOp.MAX))


def _reduction(group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType) -> Callable[[Tensor], Tensor]:
    @torch.no_grad()
    def reduce(x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, operation, group=group)
        return x

    return reduce
