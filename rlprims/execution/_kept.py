"""The sets of tokens that truncated sampling kept, as two columns of a batch.

``kept_counts`` int32 (B, T): the number of ids that the sampler kept for each response token; 0 if it kept all, and
outside the response. ``kept_ids`` int32, ragged (B, *): these ids, token after token. Without truncation a batch has
neither column.
"""

import torch
from torch import Tensor

from rlprims.data_proto import DataProto
from rlprims.types import Kept


def ids_left(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The ids with finite logits (A, V), row after row, and their counts (A,); 0 for a row in which all are finite."""
    left = logits.isfinite()
    left = left & ~left.all(-1, keepdim=True)
    return left.nonzero()[:, 1].int().cpu(), left.sum(-1, dtype=torch.int32).cpu()


class KeptSets:
    """Collects the kept sets of a batch while it is sampled, position after position."""

    def __init__(self, rows: int, width: int) -> None:
        self.ids = [torch.zeros(0, dtype=torch.int32)]
        self.counts = torch.zeros(width, rows, dtype=torch.int32)

    def add(self, position: int, rows: Tensor, logits: Tensor) -> None:
        """Add the sets of these rows, in ascending order, at a position: the ids with finite logits (A, V)."""
        ids, self.counts[position, rows.cpu()] = ids_left(logits)
        self.ids.append(ids)

    def by_row(self) -> tuple[Tensor, Tensor]:
        """The ids, row after row, and their counts (B, T)."""
        by_position = Kept.from_counts(torch.cat(self.ids), self.counts)
        order = torch.arange(self.counts.numel()).reshape(self.counts.shape).T
        return by_position.take(order.flatten()).ids, self.counts.T.contiguous()


def kept_columns(ids: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """The two columns of a batch from the ids, row after row, and their counts (B, T).

    >>> columns = kept_columns(torch.tensor([3, 5, 0]), torch.tensor([[2, 0], [1, 0]]))
    >>> [row.tolist() for row in columns["kept_ids"].unbind()]
    [[3, 5], [0]]
    """
    ends = counts.long().sum(-1).cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends])
    rows = torch.nested.nested_tensor_from_jagged(ids.int(), offsets)
    return {"kept_counts": counts.int(), "kept_ids": rows}


def kept_of(batch: DataProto) -> Kept | None:
    """The kept sets of the tokens (B, T), row after row, for ``logprobs``; None if the batch has no such columns.

    >>> batch = DataProto.from_dict(kept_columns(torch.tensor([3, 5, 0]), torch.tensor([[2, 0], [1, 0]])))
    >>> kept_of(batch[1:])
    Kept(ids=tensor([0], dtype=torch.int32), offsets=tensor([0, 1, 1]))
    """
    if "kept_ids" not in batch:
        return None
    none = torch.zeros(0, dtype=torch.int32)
    return Kept.from_counts(torch.cat([none, *batch["kept_ids"].unbind()]), batch["kept_counts"])
