"""Factors for a per-token loss, and the segments of tokens that share one factor."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from rlprims.layout import turn_boundaries
from rlprims.masking import check_choice, check_tokens
from rlprims.types import AllReduce, CuSeqlens, PerToken, TokenMask, TurnIds

Level: TypeAlias = Literal["token", "segment", "sequence"]


@dataclass(frozen=True, eq=False)
class Weights:
    """One factor per token for a loss, and the gaps between two policies that it corrects.

    Multiply the losses before the aggregation: ``losses * weights.values``. The product of two corrects the gaps of
    both; two that correct the same gap cannot be multiplied. A gate selects tokens by factors of 0 or 1, and its
    ``corrected`` is empty.

    A rejected token still counts in the denominators of the aggregations, as in every peer. To leave it out there too,
    use the mask ``response_mask & (weights.values > 0)`` instead, and count ``totals`` from it.

    Args:
        values: float (B, T) or (N,), without a gradient, 0 outside the mask.
        corrected: the gaps, each as "from->to": the policy that sampled, and the one whose gradient is estimated.

    >>> import torch
    >>> weights = Weights(torch.tensor([[2.0, 0.5]]), frozenset({"rollout->old"}))
    >>> gate = Weights(torch.tensor([[1.0, 0.0]]))
    >>> (weights * gate).values
    tensor([[2., 0.]])
    >>> weights * gate * weights
    Traceback (most recent call last):
    ...
    ValueError: correcting twice: both factors account for rollout->old; keep one of them
    """

    values: PerToken
    corrected: frozenset[str] = frozenset()

    def __mul__(self, other: "Weights") -> "Weights":
        both = self.corrected & other.corrected
        if both:
            raise ValueError(f"correcting twice: both factors account for {', '.join(sorted(both))}; keep one of them")
        return Weights(self.values * other.values, self.corrected | other.corrected)


def check_level(
    level: Level,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None,
    turn_ids: TurnIds | None,
    all_reduce_rows: AllReduce | None,
) -> None:
    """Raise ``ValueError`` for an unknown level, segments of split sequences, or ``turn_ids`` unlike the mask."""
    check_choice("level", level, Level)
    if level == "segment" and all_reduce_rows is not None:
        raise ValueError(
            "level='segment' with all_reduce_rows, expected 'token' or 'sequence' if sequences are split over ranks: "
            "sums of turns are not exchanged; gather the log-probs first"
        )
    if turn_ids is not None:
        check_tokens(response_mask, cu_seqlens, turn_ids=turn_ids)


def segments(
    level: Level, response_mask: TokenMask, cu_seqlens: CuSeqlens | None, turn_ids: TurnIds | None
) -> tuple[TokenMask, CuSeqlens | None]:
    """The mask, flattened if it is padded, and a ``cu_seqlens`` that makes each segment a sequence.

    A segment is a turn or a response: ``level`` is "segment" or "sequence". Without ``turn_ids`` a response is one
    segment.
    """
    if level == "sequence" or turn_ids is None:
        return response_mask, cu_seqlens
    return response_mask.flatten(), turn_boundaries(turn_ids, response_mask, cu_seqlens)
