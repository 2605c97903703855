"""What a ratio or a divergence is taken over: single tokens, turns, or responses."""

from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from rlprims.masking import check_tokens
from rlprims.turns import turn_boundaries
from rlprims.types import CuSeqlens, TokenMask, TurnIds

Level: TypeAlias = Literal["token", "segment", "sequence"]


class Spans(NamedTuple):
    """The mask laid out so that every span is a sequence of it, and its ``cu_seqlens``."""

    mask: TokenMask
    cu_seqlens: CuSeqlens | None

    def lay(self, x: Tensor) -> Tensor:
        return x.reshape(self.mask.shape)


def spans(
    level: Level, response_mask: TokenMask, cu_seqlens: CuSeqlens | None, turn_ids: TurnIds | None
) -> Spans | None:
    """Those of the level; None for single tokens. A response without ``turn_ids`` is one segment."""
    if level not in ("token", "segment", "sequence"):
        raise ValueError(f"unknown level {level!r}: choose 'token', 'segment' or 'sequence'")
    if turn_ids is not None:
        check_tokens(response_mask, cu_seqlens, turn_ids=turn_ids)
    if level == "token":
        return None
    if level == "sequence" or turn_ids is None:
        return Spans(response_mask, cu_seqlens)
    return Spans(response_mask.flatten(), turn_boundaries(turn_ids, response_mask, cu_seqlens))
