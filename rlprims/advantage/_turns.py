"""Sums and returns per turn, and ids of pairs, such as a state and an action."""

import torch
from torch import Tensor

from rlprims.advantage._returns import discounted_returns
from rlprims.grouping import group_ranks
from rlprims.layout import last_of_turn, sequence_sum, to_tokens, turn_boundaries
from rlprims.masking import check_tokens, zero_outside
from rlprims.types import CuSeqlens, PerToken, TokenMask, TurnIds


def turn_sums(x: PerToken, turn_ids: TurnIds, mask: TokenMask, cu_seqlens: CuSeqlens | None) -> PerToken:
    """The sum of x over the valid tokens of each turn, on each of these tokens.

    >>> mask, turns = torch.tensor([[True, True, False, True]]), torch.tensor([[0, 0, 9, 1]])
    >>> turn_sums(torch.tensor([[1.0, 2.0, torch.nan, 4.0]]), turns, mask, None)
    tensor([[3., 3., 0., 4.]])
    """
    turns, valid = turn_boundaries(turn_ids, mask, cu_seqlens), mask.flatten()
    return to_tokens(sequence_sum(x.flatten(), valid, turns), valid, turns).reshape(mask.shape)


def turn_returns(
    rewards: PerToken, turn_ids: TurnIds, mask: TokenMask, cu_seqlens: CuSeqlens | None, *, gamma: float
) -> PerToken:
    """R_k = Σ_{l≥k} γ^{l−k} r_l on each token of turn k, where r_l is the sum of the rewards of turn l.

    >>> mask, turns = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[0, 0, 1]])
    >>> turn_returns(torch.tensor([[1.0, 0.0, 4.0]]), turns, mask, None, gamma=0.5)
    tensor([[3., 3., 4.]])
    """
    to_go = discounted_returns(rewards, mask, cu_seqlens, turn_ids=turn_ids, gamma=gamma)
    last = last_of_turn(turn_ids, mask, cu_seqlens)
    return turn_sums(torch.where(last, to_go, zero_outside(rewards, mask)), turn_ids, mask, cu_seqlens)


def pair_ids(first: Tensor, second: Tensor) -> Tensor:
    """An id for each pair of integers: int64, dense, computed on the device.

    >>> pair_ids(torch.tensor([[0, 0], [1, 1]]), torch.tensor([[7, -2], [7, 7]]))
    tensor([[1, 0],
            [2, 2]])
    """
    a, b = first.flatten(), second.flatten()
    order = b.argsort(stable=True)
    order = order[a[order].argsort(stable=True)]
    a, b = a[order], b[order]
    is_new = (a[1:] != a[:-1]) | (b[1:] != b[:-1])
    ids = torch.cat([torch.zeros_like(order[:1]), is_new.long().cumsum(0)])
    return torch.zeros_like(order).index_put((order,), ids).reshape(first.shape)


def first_of_each(ids: Tensor, valid: Tensor) -> Tensor:
    """True on the first valid entry of each id.

    >>> first_of_each(torch.tensor([0, 1, 0, 1]), torch.tensor([False, True, True, True])).tolist()
    [False, True, True, False]
    """
    ranks = group_ranks(torch.zeros_like(ids), ids, valid)
    return ranks.unsort(ranks.ranks == 0) & valid


def check_ids(mask: TokenMask, cu_seqlens: CuSeqlens | None, **ids: Tensor) -> None:
    """Raise ``ValueError`` unless every named tensor has integers and the shape of the mask."""
    check_tokens(mask, cu_seqlens, **ids)
    for name, x in ids.items():
        if x.is_floating_point() or x.dtype is torch.bool:
            raise ValueError(f"{name} has dtype {x.dtype}, expected integers: a number for each {name[:-4]}")
