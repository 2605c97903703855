"""The optimal token baseline: a baseline for each token, from the tokens of the group at the same step."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from rlprims._described import described
from rlprims.advantage._group import Singleton, tokens_of_valid_rows
from rlprims.grouping import group_centred, group_count, group_sum
from rlprims.layout import expand_to_tokens, sequence_lengths
from rlprims.masking import check_at_least, check_choice, check_tokens, upcast, zero_outside
from rlprims.scan import sum_from_right
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask

Align: TypeAlias = Literal["tokens", "columns"]


@described
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
    align: Align = "tokens",
    singleton: Singleton = "zero",
    eps: float = 1e-8,
) -> PerToken:
    """A baseline for each token, weighted by the gradient energy up to that token: the OTB of verl 0.9.

    G_t = Σ_{u≥t} r_u is the reward-to-go, w_t = 1 − 2 π_t + Σ_v π_v² the squared norm of ∇ log π_t by the logits, and
    W_t = Σ_{u≤t} w_u ρ_u² the energy of a response up to t. Over the responses j of the group that have a token t,

        A_it = G_it − Σ_j (W_jt + ε) G_jt / Σ_j (W_jt + ε).

    Where sources disagree: verl adds ε to the divisor only, which biases every baseline towards 0. Here the baseline of
    equal returns is exactly that return, and if all energies are 0 the baseline is the plain mean.

    Args:
        old_log_probs: log π_t of the sampled token.
        sum_pi_squared: Σ_v π_v² over the vocabulary of the same policy; from logits z, exp(lse(2z) − 2 lse(z)).
        importance_weights: ρ, the importance weights of the loss; None: 1.
        align: "tokens" compares the t-th valid tokens, without tool output (verl's tir_optimal_token_baseline);
            "columns" compares tokens in the same column (verl's optimal_token_baseline).
        singleton: the advantage of a token t if no other response of the group has one: "zero" (it is its own baseline,
            A = 0) or "raw" (A = G, verl's handle_zero_tail).
        eps: ε, in units of w.

    >>> m, lp = torch.tensor([[True, True], [True, False]]), torch.full((2, 2), 0.5).log()
    >>> energy = torch.tensor([[0.5, 0.5], [0.25, 0.25]])
    >>> optimal_token_baseline(torch.tensor([[0.0, 3.0], [0.0, 0.0]]), torch.tensor([0, 0]), lp, energy, m)
    tensor([[ 1.,  0.],
            [-2.,  0.]])
    """
    check_choice("align", align, Align)
    check_choice("singleton", singleton, Singleton)
    check_at_least(0, eps=eps)
    check_tokens(response_mask, cu_seqlens, rewards=rewards, old_log_probs=old_log_probs, sum_pi_squared=sum_pi_squared)
    mask = tokens_of_valid_rows(response_mask, group_ids, cu_seqlens, valid_rows)
    returns = sum_from_right(rewards, mask, cu_seqlens)
    energy = zero_outside(_energy(upcast(old_log_probs.detach()), upcast(sum_pi_squared)), mask)
    if importance_weights is not None:
        check_tokens(mask, cu_seqlens, importance_weights=importance_weights)
        energy = energy * zero_outside(importance_weights, mask).square()
    weights = _sum_from_left(energy, mask, cu_seqlens).to(returns.dtype) + eps

    # The tokens that are compared form a group, so that the statistics of groups of rows apply.
    ids = _ids_of_steps(group_ids, mask if align == "tokens" else torch.ones_like(mask), cu_seqlens).flatten()
    returns, weights, valid = returns.flatten(), weights.flatten(), mask.flatten()
    # The mean return is subtracted first, so that equal returns give exactly 0.
    centred = group_centred(returns, ids, valid)
    total = group_sum(weights, ids, valid)
    a = centred - group_sum(weights * centred, ids, valid) / torch.where(total == 0, 1.0, total)
    if singleton == "raw":
        a = torch.where(group_count(ids, valid) > 1, a, returns)
    return zero_outside(a, valid).reshape(mask.shape)


def _energy(log_pi: Tensor, sum_pi_squared: Tensor) -> Tensor:
    """1 − 2π + Σ_v π_v², computed as (1 − π)² plus the rest, which is 0 if it is only the rounding error of 1 − 1.

    >>> _energy(torch.tensor([0.5, 1.0]).log(), torch.tensor([0.375, 1.0 - 1e-7]))
    tensor([0.3750, 0.0000])
    """
    pi_minus_one = log_pi.expm1()
    rest = sum_pi_squared - (pi_minus_one + 1).square()
    return pi_minus_one.square() + hardshrink(rest, 4 * torch.finfo(rest.dtype).eps)


def _sum_from_left(x: PerToken, mask: TokenMask, cu_seqlens: CuSeqlens | None) -> PerToken:
    """Σ_{u≤t} x_u over the valid tokens of each sequence."""
    reversed_cu_seqlens = None if cu_seqlens is None else x.shape[0] - cu_seqlens.flip(0)
    return sum_from_right(x.flip(-1), mask.flip(-1), reversed_cu_seqlens).flip(-1)


def _ids_of_steps(group_ids: GroupIds, counted: TokenMask, cu_seqlens: CuSeqlens | None) -> Tensor:
    """Ids that are equal for tokens of one group at the same step, the number of counted tokens before a token.

    Each group has as many ids as its sequences have positions together, which is enough for the longest of them.
    """
    so_far = counted.long().cumsum(-1)
    if cu_seqlens is not None:
        before = torch.cat([so_far.new_zeros(1), so_far])[cu_seqlens[:-1]]
        so_far = so_far - expand_to_tokens(before, counted, cu_seqlens)
    steps = (so_far - 1).clamp(min=0)
    lengths = sequence_lengths(torch.ones_like(counted), cu_seqlens)
    sizes = torch.zeros_like(group_ids).index_add(0, group_ids, lengths)
    first = sizes.cumsum(0) - sizes
    return expand_to_tokens(first[group_ids], counted, cu_seqlens) + steps
