"""Turns of a response: where one ends, and boundaries under which every turn is a sequence."""

import torch

from rlprims.layout import last_token
from rlprims.masking import check_tokens
from rlprims.scan import next_valid
from rlprims.types import CuSeqlens, TokenMask, TurnIds


def last_of_turn(turn_ids: TurnIds, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> TokenMask:
    """True on valid tokens that end the sequence or are followed by a valid token of another turn.

    >>> turns, m = torch.tensor([[0, 0, 9, 1, 1]]), torch.tensor([[True, True, False, True, True]])
    >>> last_of_turn(turns, m).tolist()
    [[False, True, False, False, True]]
    """
    check_tokens(response_mask, cu_seqlens, turn_ids=turn_ids)
    if turn_ids.is_floating_point() or turn_ids.dtype is torch.bool:
        raise ValueError(f"turn_ids has dtype {turn_ids.dtype}, expected integers: the number of each token's turn")
    next_turn = turn_ids.gather(-1, next_valid(response_mask))
    return response_mask & (last_token(response_mask, cu_seqlens) | (next_turn != turn_ids))


def turn_boundaries(turn_ids: TurnIds, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> CuSeqlens:
    """``cu_seqlens`` under which every turn of the flattened tokens is a sequence: int64 (N+1,), empty ones at the end.

    Any function of sequences computes with them a number per turn. The number of turns is not read by the host. A
    masked token belongs to the turn before or after it.

    >>> turn_boundaries(torch.tensor([[0, 0, 1], [0, 7, 7]]), torch.tensor([[True, True, True], [True, False, False]]))
    tensor([0, 2, 3, 4, 6, 6, 6])
    """
    ends = last_of_turn(turn_ids, response_mask, cu_seqlens).flatten().long()
    turn = ends.cumsum(0) - ends
    return torch.searchsorted(turn, torch.arange(turn.shape[0] + 1, device=turn.device))
