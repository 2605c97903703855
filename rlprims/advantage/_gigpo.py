"""See :func:`gigpo`."""

from functools import partial

import torch
from torch import Tensor

from rlprims.advantage._grpo import standard_scores
from rlprims.advantage._responses import response_scores
from rlprims.advantage._returns import discounted_returns
from rlprims.layout import sequence_ids, sequence_sum, to_tokens
from rlprims.masking import check_tokens, zero_outside
from rlprims.turns import last_of_turn, turn_boundaries
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask, TurnIds


def gigpo(
    rewards: PerToken,
    group_ids: GroupIds,
    turn_ids: TurnIds,
    state_ids: Tensor,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    omega: float = 1.0,
    gamma: float = 0.95,
    normalize_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    tolerance: float = 1e-6,
) -> PerToken:
    """Group-in-group policy optimization, Feng et al. 2025 (arXiv:2505.10978): episodes compared, and steps too.

    A = A^E + ω A^S. A^E is :func:`grpo` of the episode's whole reward. A step is a turn; R_k = Σ_{l≥k} γ^{l−k} r_l is
    its return, discounted by turn, and A^S = (R_k − μ) / (σ + ε) over all steps that the samples of one prompt took
    from the same (anchor) state. Both are the same on every token of the step. A state that was visited once has
    A^S = 0.

    Where sources disagree: μ and σ of A^E are over episodes, as in the paper; the authors' code has one entry per step
    there, so that long episodes count for more. ``normalize_std=False`` is the paper's variant without the deviations.

    More levels than two, such as GRPO by agent inside GRPO by episode, are sums of :func:`grpo` with different ids.

    Args:
        rewards: float (B, T) or (N,), per token: each turn's reward anywhere in it.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        turn_ids: int (B, T) or (N,), which turn of the response a valid token belongs to.
        state_ids: int (B, T) or (N,), the state that the turn answers, on each of its tokens. Any numbers, a hash for
            one; equal numbers of different prompts are different states.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.
        valid_rows: bool (B,), rows that count; the others are in no statistic and get 0. None: all.
        omega: ω, weight of the steps.
        gamma: discount per turn.
        normalize_std: divide by σ + ε, on both levels.
        ddof: σ's divisor is n − ddof.
        eps: ε, in units of the reward.
        tolerance: a group is constant, and gets 0, if max − min <= tolerance · max(1, |max|, |min|).

    Returns:
        float, like rewards; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> m = torch.ones(2, 2, dtype=torch.bool)
    >>> turns, states = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[5, 7], [5, 8]])  # they part after the first turn
    >>> gigpo(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([0, 0]), turns, states, m)
    tensor([[ 1.4142,  0.7071],
            [-1.4142, -0.7071]])
    """
    s, response_mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    check_tokens(response_mask, cu_seqlens, state_ids=state_ids)
    if state_ids.is_floating_point() or state_ids.dtype is torch.bool:
        raise ValueError(f"state_ids has dtype {state_ids.dtype}, needs integers: a number for each state")
    scored = partial(
        standard_scores, normalize_std=normalize_std, ddof=ddof, eps=eps, singleton="zero", tolerance=tolerance
    )
    episodes = to_tokens(scored(s, group_ids, valid_rows), response_mask, cu_seqlens)

    # A turn's return is its own rewards and, on its last token, what is discounted from there on.
    last = last_of_turn(turn_ids, response_mask, cu_seqlens)
    to_go = discounted_returns(rewards, response_mask, cu_seqlens, turn_ids=turn_ids, gamma=gamma)
    paid = torch.where(last, to_go, zero_outside(rewards, response_mask)).flatten()
    turns, mask = turn_boundaries(turn_ids, response_mask, cu_seqlens), response_mask.flatten()
    returns = to_tokens(sequence_sum(paid, mask, turns), mask, turns)
    # Every token gets the number of its turn, which is counted once, by its last token.
    steps = scored(returns, _visits(group_ids, state_ids, cu_seqlens), last.flatten()).reshape(last.shape)
    return episodes + omega * zero_outside(steps, response_mask)


def _visits(group_ids: GroupIds, state_ids: Tensor, cu_seqlens: CuSeqlens | None) -> Tensor:
    """A number for each pair of prompt and state: int64 (tokens,), dense, and found without reading a value."""
    if cu_seqlens is None:
        prompt = group_ids[:, None].expand(state_ids.shape).flatten()
    else:
        prompt = group_ids[sequence_ids(cu_seqlens, len(state_ids))]
    state = state_ids.flatten()
    order = state.argsort(stable=True)
    order = order[prompt[order].argsort(stable=True)]
    prompt, state = prompt[order], state[order]
    changes = (prompt[1:] != prompt[:-1]) | (state[1:] != state[:-1])
    numbers = torch.cat([torch.zeros_like(order[:1]), changes.long().cumsum(0)])
    return torch.empty_like(order).index_put((order,), numbers)
