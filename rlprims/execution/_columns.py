"""Columns of batches: padded tokens, the kept sets of :class:`Execution`, and what a loss reads of stored rows."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlprims import losses
from rlprims.algorithms import BoundFunction
from rlprims.data_proto import DataProto
from rlprims.types import SamplingSupport

Kind: TypeAlias = Literal["demonstrations", "pairs", "scores"]

_READS: dict[Kind, set[str]] = {
    "demonstrations": {"log_probs", "response_mask"},
    "pairs": {"chosen_log_probs", "rejected_log_probs", "ref_chosen_log_probs", "ref_rejected_log_probs"},
    "scores": {"chosen_scores", "rejected_scores"},
}


def left_padded(ids: Sequence[Sequence[int]], width: int, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """int64 and bool (B, width): the tokens at the right end of each row, and their mask.

    >>> left_padded([[5, 6], [7]], 3, 0)[0].tolist()
    [[0, 5, 6], [0, 0, 7]]
    """
    lengths = torch.tensor([len(row) for row in ids], dtype=torch.int64)
    return _padded(ids, torch.arange(width) >= width - lengths[:, None], pad_token_id)


def right_padded(ids: Sequence[Sequence[int]], width: int, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """int64 and bool (B, width): the tokens at the left end of each row, and their mask."""
    lengths = torch.tensor([len(row) for row in ids], dtype=torch.int64)
    return _padded(ids, torch.arange(width) < lengths[:, None], pad_token_id)


def _padded(ids: Sequence[Sequence[int]], mask: Tensor, pad_token_id: int) -> tuple[Tensor, Tensor]:
    tokens = torch.tensor([token for row in ids for token in row], dtype=torch.int64)
    return torch.full(mask.shape, pad_token_id, dtype=torch.int64).masked_scatter(mask, tokens), mask


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


def kept_of(batch: DataProto) -> SamplingSupport | None:
    """The kept sets of the tokens (B, T), row after row, for ``logprobs``; None if the batch has no such columns.

    >>> batch = DataProto.from_dict(kept_columns(torch.tensor([3, 5, 0]), torch.tensor([[2, 0], [1, 0]])))
    >>> kept_of(batch[1:])
    SamplingSupport(ids=tensor([0], dtype=torch.int32), offsets=tensor([0, 1, 1]))
    """
    if "kept_ids" not in batch:
        return None
    none = torch.zeros(0, dtype=torch.int32)
    return SamplingSupport.from_counts(torch.cat([none, *batch["kept_ids"].unbind()]), batch["kept_counts"])


def kind_of(loss: BoundFunction) -> Kind:
    """The kind of rows that a loss needs.

    Raises:
        ValueError: the loss has a parameter that no kind of stored rows has.

    >>> from rlprims import losses
    >>> from rlprims.algorithms import use
    >>> [kind_of(use(loss)) for loss in (losses.nll, losses.dpo, losses.bradley_terry)]
    ['demonstrations', 'pairs', 'scores']
    """
    for kind, names in _READS.items():
        if loss.needs <= names:
            return kind
    raise ValueError(
        f"{loss.path} needs {sorted(loss.needs)}: expected a loss of log_probs and response_mask, as losses.nll; of "
        "chosen_log_probs and rejected_log_probs, as losses.dpo; or of chosen_scores and rejected_scores, as "
        "losses.bradley_terry"
    )


def reads_reference(loss: BoundFunction) -> bool:
    """Whether a loss on pairs reads the reference's log-probs."""
    return "ref_chosen_log_probs" in loss.needs


def reads_means(loss: BoundFunction) -> bool:
    """Whether a loss on pairs is defined on the mean log-prob of each response, and not on the sum."""
    return loss.fn in (losses.orpo, losses.simpo)
