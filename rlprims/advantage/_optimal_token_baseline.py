"""See :func:`optimal_token_baseline`."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlprims._groups import checked_largest
from rlprims.advantage._responses import tokens_of_valid_rows
from rlprims.layout import sequence_ids
from rlprims.masking import as_numbers, check_sequences, check_tokens, upcast, zero_outside
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
        sum_pi_squared: float, like rewards: Σ_v π_v² over the vocabulary, exp(lse(2z) − 2 lse(z)) of the logits z; of
            the policy that π_t is of, so at least π_t².
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
    largest = checked_largest(group_ids)
    mask = tokens_of_valid_rows(response_mask, cu_seqlens, valid_rows)
    returns = sums_from_right(zero_outside(rewards, mask), cu_seqlens)
    energy = zero_outside(_energy(upcast(old_log_probs.detach()), upcast(sum_pi_squared)), mask)
    if importance_weights is not None:
        check_tokens(mask, cu_seqlens, importance_weights=importance_weights)
        energy = energy * zero_outside(importance_weights, mask).square()
    valid = as_numbers(mask, returns.dtype)
    weights = _sum_so_far(energy, cu_seqlens).to(returns.dtype).add_(eps).mul_(valid)

    slots = _slots(group_ids, mask, cu_seqlens, largest, compact=align == "tokens")
    compared = slots.sum(valid) > (1 if alone == "raw" else 0)
    # From the smallest, so that equal returns give exactly 0. 1/0 − 1 puts what is outside the mask beyond every
    # return; torch.where takes ten times as long.
    floor = zero_outside(slots.smallest(valid.reciprocal().sub_(1).add_(returns.detach())), compared)
    above = returns - slots.tokens(floor)
    total = slots.sum(weights)
    baseline = zero_outside(slots.sum(weights * above) / torch.where(total == 0, 1.0, total), compared)
    return zero_outside(above - slots.tokens(baseline), mask)


def _energy(log_pi: Tensor, sum_pi_squared: Tensor) -> Tensor:
    """1 − 2π + Σ_v π_v², as (1 − π)² and what the other tokens of the vocabulary add to it.

    At a token that is all but certain the second is the rounding of 1 − 1, of either sign, and the first keeps its
    digits.

    >>> _energy(torch.tensor([0.5, 1.0]).log(), torch.tensor([0.375, 1.0 - 1e-7]))
    tensor([0.3750, 0.0000])
    """
    less = log_pi.expm1()
    pi = less + 1
    others = torch.addcmul(sum_pi_squared, pi, pi, value=-1)
    return torch.addcmul(torch.nn.functional.hardshrink(others, 4 * torch.finfo(others.dtype).eps), less, less)


class _Slots(NamedTuple):
    """Where tokens meet those of their group at the same step: in one row per id, or, packed, in one of many slots."""

    ids: Tensor
    shape: tuple[int, ...]
    column: Tensor | None = None

    def sum(self, x: Tensor) -> Tensor:
        return x.new_zeros(self.shape).index_add_(0, self.ids, self._moved(x, 0.0))

    def smallest(self, x: Tensor) -> Tensor:
        x = self._moved(x, torch.inf)
        index = self.ids if x.dim() == 1 else self.ids[:, None].expand(x.shape)
        return x.new_full(self.shape, torch.inf).scatter_reduce_(0, index, x, "amin")

    def tokens(self, x: Tensor) -> Tensor:
        """Each token its slot's."""
        x = x.index_select(0, self.ids)
        return x if self.column is None else x.gather(1, self.column)

    def _moved(self, x: Tensor, rest: float) -> Tensor:
        # Whole rows are summed ten times as fast as tokens one by one, so the valid ones move together first; the
        # others meet in one more column.
        if self.column is None:
            return x
        return x.new_full((len(x), self.shape[1]), rest).scatter(1, self.column, x)


def _slots(
    group_ids: GroupIds, mask: TokenMask, cu_seqlens: CuSeqlens | None, largest: int | None, *, compact: bool
) -> _Slots:
    if cu_seqlens is not None:
        return _Slots(_packed_slots(group_ids, mask, cu_seqlens, compact=compact), tuple(mask.shape))
    entries, width = len(mask) if largest is None else largest + 1, mask.shape[1]
    if not compact:
        return _Slots(group_ids, (entries, width))
    return _Slots(group_ids, (entries, width + 1), torch.where(mask, mask.cumsum(-1) - 1, width))


def _sum_so_far(x: PerToken, cu_seqlens: CuSeqlens | None) -> PerToken:
    """Σ_{u≤t} x_u in each sequence."""
    if cu_seqlens is None:
        return x.cumsum(-1)
    return sums_from_right(x.flip(0), len(x) - cu_seqlens.flip(0)).flip(0)


def _packed_slots(group_ids: GroupIds, response_mask: TokenMask, cu_seqlens: CuSeqlens, *, compact: bool) -> Tensor:
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
