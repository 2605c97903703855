"""See :func:`optimal_token_baseline`."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from rlprims.advantage._responses import tokens_of_valid_rows
from rlprims.advantage._returns import discounted_returns
from rlprims.grouping import check_group_ids
from rlprims.masking import check_sequences, check_tokens, sequence_ids, zero_outside
from rlprims.recurrence import sums_from_right
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask


def optimal_token_baseline(
    rewards: PerToken,
    group_ids: GroupIds,
    old_log_probs: PerToken,
    sum_pi_squared: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    importance_weights: PerToken | None = None,
    *,
    align: Literal["tokens", "columns"] = "tokens",
    alone: Literal["zero", "raw"] = "zero",
    eps: float = 1e-8,
) -> PerToken:
    """A baseline for each token, weighted by the energy of the gradient so far: the OTB of verl 0.9.

    G_t = Σ_{u≥t} r_u is the reward-to-go. A token's score function with respect to the logits has squared norm
    w_t = 1 − 2 π_t + Σ_v π_v², and W_t = Σ_{u≤t} w_u ρ_u² is what a response has gathered by t. Over the responses j of
    the group that have a token t,

        A_it = G_it − Σ_j (W_jt + ε) G_jt / Σ_j (W_jt + ε).

    Where the sources disagree: verl adds ε to the divisor only, which draws every baseline towards 0; here equal
    returns give exactly that return, and where no token has any energy the baseline is the plain mean.

    Args:
        rewards: float (B, T) or (N,), per token.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        old_log_probs: float, like rewards: log π_t of the sampled token.
        sum_pi_squared: float, like rewards: Σ_v π_v² over the vocabulary, exp(lse(2z) − 2 lse(z)) of the logits z.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.
        valid_rows: bool (B,), rows that count; the others are in no statistic and get 0. None: all.
        importance_weights: float, like rewards: ρ, the correction that the loss will weigh by; None: 1.
        align: which tokens of two responses are compared: the t-th valid ones, tool output left out ("tokens": verl's
            tir_optimal_token_baseline), or those in the same column ("columns": verl's optimal_token_baseline, for
            responses without gaps that begin in the same column).
        alone: a token that no other response of the group has, since that response is the longest or the only one:
            "zero" (it is its own baseline, A = 0) or "raw" (A = G, verl's handle_zero_tail).
        eps: ε, in units of w.

    Returns:
        float, like rewards; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> m, lp = torch.tensor([[True, True], [True, False]]), torch.full((2, 2), 0.5).log()
    >>> energy = torch.tensor([[0.5, 0.5], [0.25, 0.25]])
    >>> optimal_token_baseline(torch.tensor([[0.0, 3.0], [0.0, 0.0]]), torch.tensor([0, 0]), lp, energy, m)
    tensor([[ 1.,  0.],
            [-2.,  0.]])
    """
    check_tokens(response_mask, cu_seqlens, rewards=rewards, old_log_probs=old_log_probs, sum_pi_squared=sum_pi_squared)
    check_sequences(response_mask, cu_seqlens, group_ids=group_ids)
    check_group_ids(group_ids)
    response_mask = tokens_of_valid_rows(response_mask, cu_seqlens, valid_rows)
    returns = discounted_returns(rewards, response_mask, cu_seqlens)
    pi = zero_outside(old_log_probs, response_mask).detach().exp()
    energy = 1 - 2 * pi + zero_outside(sum_pi_squared, response_mask)
    # At a token that is all but certain this is the rounding of 1 − 1, of either sign: no energy.
    energy = torch.where(energy.abs() > 4 * torch.finfo(energy.dtype).eps, energy, 0.0)
    if importance_weights is not None:
        check_tokens(response_mask, cu_seqlens, importance_weights=importance_weights)
        energy = energy * zero_outside(importance_weights, response_mask).square()
    gathered = _sum_so_far(zero_outside(energy, response_mask), cu_seqlens).to(returns.dtype)

    over_group = _over_group(group_ids, response_mask, cu_seqlens, compact=align == "tokens")
    weights = torch.where(response_mask, gathered + eps, 0.0)
    floor = over_group(torch.where(response_mask, returns, torch.inf), "amin")
    above = torch.where(response_mask, returns - floor, 0.0)  # from the smallest: equal returns give exactly 0
    total = over_group(weights, "sum")
    a = above - over_group(weights * above, "sum") / torch.where(total > 0, total, 1.0)
    company = over_group(response_mask.to(a.dtype), "sum")
    return zero_outside(torch.where(company > 1, a, returns if alone == "raw" else 0.0), response_mask)


def _over_group(
    group_ids: GroupIds, response_mask: TokenMask, cu_seqlens: CuSeqlens | None, *, compact: bool
) -> Callable[[PerToken, Literal["sum", "amin"]], PerToken]:
    """Of a number per token, 0 or inf outside the mask: its sum or smallest over the group at the same step."""
    if cu_seqlens is not None:
        slots = _slots(group_ids, response_mask, cu_seqlens, compact=compact)
        return lambda x, reduce: _reduced(x, slots, reduce)[slots]
    if not compact:
        return lambda x, reduce: _reduced(x, group_ids, reduce).index_select(0, group_ids)
    # Whole rows are summed ten times as fast as tokens one by one, so the valid tokens move together first; the others
    # meet in one more column.
    column = torch.where(response_mask, response_mask.cumsum(-1) - 1, response_mask.shape[-1])

    def over(x: PerToken, reduce: Literal["sum", "amin"]) -> PerToken:
        room = x.new_full((len(x), x.shape[1] + 1), torch.inf if reduce == "amin" else 0.0)
        return _reduced(room.scatter(1, column, x), group_ids, reduce).index_select(0, group_ids).gather(1, column)

    return over


def _reduced(x: Tensor, ids: Tensor, reduce: Literal["sum", "amin"]) -> Tensor:
    """One entry (or row) for each id, as many as x has."""
    if reduce == "sum":
        return torch.zeros_like(x).index_add(0, ids, x)
    index = ids if x.dim() == 1 else ids[:, None].expand(x.shape)
    return torch.full_like(x, torch.inf).scatter_reduce(0, index, x, "amin")


def _sum_so_far(x: PerToken, cu_seqlens: CuSeqlens | None) -> PerToken:
    """Σ_{u≤t} x_u in each sequence."""
    if cu_seqlens is None:
        return x.cumsum(-1)
    return sums_from_right(x.flip(0), len(x) - cu_seqlens.flip(0)).flip(0)


def _slots(group_ids: GroupIds, response_mask: TokenMask, cu_seqlens: CuSeqlens, *, compact: bool) -> Tensor:
    """The number that a packed token shares with those of its group at the same step; below the number of tokens.

    Each group owns as many slots as its sequences have positions, which is enough for the longest.
    """
    owner = sequence_ids(cu_seqlens, len(response_mask))
    lengths = cu_seqlens.diff().long()
    if compact:
        so_far = torch.cat([torch.zeros_like(lengths[:1]), response_mask.cumsum(0)])
        steps = (so_far[1:] - so_far[cu_seqlens[:-1]][owner] - 1).clamp(min=0)
    else:
        steps = torch.arange(len(response_mask), device=response_mask.device) - cu_seqlens[:-1][owner]
    sizes = torch.zeros_like(group_ids).index_add(0, group_ids, lengths)
    first = (sizes.cumsum(0) - sizes)[group_ids]
    return first[owner] + steps
