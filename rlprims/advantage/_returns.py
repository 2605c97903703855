"""Returns and advantages per token, from rewards and a critic: reward-to-go, GAE and TD(λ); sums and returns per turn.

They are recurrences S_t = x_t + a_t S_{t+1} over the valid tokens of a sequence. Masked tokens (tool output) are
skipped: t+1 is the next valid token, so the result equals that of the sequence without the masked tokens.
"""

import torch
from torch import Tensor

from rlprims import scan
from rlprims._described import described
from rlprims.grouping import group_ranks
from rlprims.layout import last_of_turn, sequence_lengths, sequence_sum, to_tokens, turn_boundaries
from rlprims.masking import check_above, check_range, check_sequences, check_tokens, upcast, zero_outside
from rlprims.types import CuSeqlens, PerSequence, PerToken, SequenceShard, TokenMask, TurnIds


@described
def discounted_returns(
    rewards: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    bootstrap_values: PerSequence | None = None,
    turn_ids: TurnIds | None = None,
    *,
    gamma: float = 1.0,
    shard: SequenceShard | None = None,
) -> PerToken:
    """Discounted reward-to-go, R_t = r_t + γ R_{t+1}, over the valid tokens of each sequence.

    It is the return of REINFORCE (Williams 1992, eq. 4), used as an advantage without a baseline.

    Args:
        turn_ids: the turn of the response that a valid token belongs to. The return is then discounted between turns
            and not inside a turn. With each turn's reward on its last token, every token of a turn has the turn's
            return: ROLL's step_reinforce. None: every token is a turn.
        gamma: discount per valid token, or per turn; in [0, 1].

    >>> m = torch.tensor([[True, True, False, True]])
    >>> discounted_returns(torch.tensor([[0.0, 0.0, 9.0, 1.0]]), m, gamma=0.5)
    tensor([[0.2500, 0.5000, 0.0000, 1.0000]])
    >>> discounted_returns(torch.tensor([[0.0, 0.0, 9.0, 1.0]]), m, turn_ids=torch.tensor([[0, 0, 0, 1]]), gamma=0.5)
    tensor([[0.5000, 0.5000, 0.0000, 1.0000]])
    """
    check_range(0, 1, gamma=gamma)
    check_critic_data(response_mask, cu_seqlens, bootstrap_values, rewards=rewards)
    rewards = upcast(rewards)
    discount: float | PerToken = gamma
    if turn_ids is not None:
        turn_ends = _last_of_turn(turn_ids, response_mask, cu_seqlens, shard)
        discount = torch.where(turn_ends, gamma, rewards.new_ones((), dtype=torch.float64))
    returns = scan.discounted_sum(rewards, discount, response_mask, cu_seqlens, shard, bootstrap_values)
    return zero_outside(returns, response_mask)


def _last_of_turn(
    turn_ids: TurnIds, mask: TokenMask, cu_seqlens: CuSeqlens | None, shard: SequenceShard | None
) -> TokenMask:
    """``layout.last_of_turn``; with a shard, the last tokens of the turns of the whole sequence."""
    if shard is None:
        return last_of_turn(turn_ids, mask, cu_seqlens)
    check_tokens(mask, cu_seqlens, turn_ids=turn_ids)
    rows = mask.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    no_turn = torch.full((rows,), torch.nan, dtype=torch.float64, device=mask.device)
    return mask & (scan.next_values(turn_ids.double(), mask, no_turn, cu_seqlens, shard) != turn_ids)


@described
def gae(
    rewards: PerToken,
    values: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    bootstrap_values: PerSequence | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    shard: SequenceShard | None = None,
) -> PerToken:
    """Generalized advantage estimation, Schulman et al. 2016 (arXiv:1506.02438), eqs. 10 and 16.

    δ_t = r_t + γ V_{t+1} − V_t and A_t = δ_t + γλ A_{t+1}, over the valid tokens of each sequence. After the last token
    V is ``bootstrap_values`` (0 by default) and A is 0. The result is not whitened: see :func:`whiten`.

    Peers disagree on masked tokens (tool output): verl 0.9 and NeMo-RL skip them too. OpenRLHF sets their values to 0
    and discounts over them. slime and SkyRL use the critic's values of tool tokens.

    Returns:
        0 outside the mask. The critic's target is ``advantages + values``, or :func:`td_lambda` with another λ.

    >>> m = torch.tensor([[True, True, False, True]])
    >>> v = torch.tensor([[0.1, 0.2, 9.0, 0.4]])
    >>> gae(torch.tensor([[0.0, 0.0, 9.0, 1.0]]), v, m, lam=0.5)
    tensor([[0.3500, 0.5000, 0.0000, 0.6000]])
    """
    check_range(0, 1, gamma=gamma, lam=lam)
    return _gae(rewards, values, response_mask, cu_seqlens, bootstrap_values, gamma, lam, shard)


def _gae(
    rewards: PerToken,
    values: PerToken,
    mask: TokenMask,
    cu_seqlens: CuSeqlens | None,
    bootstrap_values: PerSequence | None,
    gamma: float,
    lam: float | PerToken,
    shard: SequenceShard | None,
) -> PerToken:
    """:func:`gae` with one λ for all tokens, or one λ per token."""
    check_critic_data(mask, cu_seqlens, bootstrap_values, rewards=rewards, values=values)
    rewards, values = upcast(rewards), upcast(values)
    next_values = scan.next_values(values, mask, bootstrap_values, cu_seqlens, shard)
    td_errors = rewards + gamma * next_values - values
    advantages = scan.discounted_sum(td_errors, gamma * lam, mask, cu_seqlens, shard)
    return zero_outside(advantages, mask)


@described
def length_adaptive_gae(
    rewards: PerToken,
    values: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    bootstrap_values: PerSequence | None = None,
    *,
    gamma: float = 1.0,
    alpha: float = 0.05,
    shard: SequenceShard | None = None,
) -> PerToken:
    """GAE with a λ for each response, VAPO, Yue et al. 2025 (arXiv:2504.05118): λ = 1 − 1 / (α l).

    α is ``alpha``, above 0, and l the number of valid tokens; up to 1/α tokens λ is 0, as in NeMo-RL. A reward on the
    last token counts for the first token with weight λ^l, which vanishes for large l if λ is fixed; here it is about
    exp(−1/α) for every length. VAPO's critic uses λ = 1: its target is ``td_lambda(..., lam=1.0)`` and not these
    advantages + values. λ depends on the whole response's length: the estimate can be biased even with true values.

    >>> m = torch.tensor([[True, True, True, True], [True, True, False, False]])
    >>> r = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
    >>> length_adaptive_gae(r, torch.zeros(2, 4), m, alpha=0.5)  # λ is 1/2 and 0
    tensor([[0.1250, 0.2500, 0.5000, 1.0000],
            [0.0000, 1.0000, 0.0000, 0.0000]])
    """
    check_above(0, ": λ is 1 − 1 / (alpha · length)", alpha=alpha)
    check_range(0, 1, gamma=gamma)
    check_tokens(response_mask, cu_seqlens, rewards=rewards)
    all_reduce_rows = None if shard is None else shard.all_reduce_rows
    lengths = sequence_lengths(response_mask, cu_seqlens, all_reduce_rows=all_reduce_rows)
    lam = to_tokens(1 - 1 / (alpha * lengths.double()).clamp(min=1), response_mask, cu_seqlens)
    return _gae(rewards, values, response_mask, cu_seqlens, bootstrap_values, gamma, lam, shard)


@described
def td_lambda(
    rewards: PerToken,
    values: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    bootstrap_values: PerSequence | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    shard: SequenceShard | None = None,
) -> PerToken:
    """λ-returns, Sutton & Barto 2018, eq. 12.20: the critic's target of TD(λ).

    G_t = r_t + γ ((1 − λ) V_{t+1} + λ G_{t+1}) over the valid tokens of each sequence. After the last token V and G are
    ``bootstrap_values`` (0 by default). λ = 0 is the one-step target, λ = 1 the discounted return. It equals
    ``gae(...) + values``. In VAPO (Yue et al. 2025, arXiv:2504.05118) the critic has λ = 1.

    >>> m = torch.tensor([[True, False, True]])
    >>> td_lambda(torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[0.3, 9.0, 0.5]]), m, lam=0.5)
    tensor([[0.7500, 0.0000, 1.0000]])
    """
    advantages = gae(rewards, values, response_mask, cu_seqlens, bootstrap_values, gamma=gamma, lam=lam, shard=shard)
    return advantages + zero_outside(values, response_mask)


def check_critic_data(
    response_mask: TokenMask, cu_seqlens: CuSeqlens | None, bootstrap_values: PerSequence | None, **per_token: PerToken
) -> None:
    """Raise ``ValueError`` unless the tensors have the shape of the mask and the bootstrap values are (B,)."""
    check_tokens(response_mask, cu_seqlens, **per_token)
    if bootstrap_values is not None:
        check_sequences(response_mask, cu_seqlens, bootstrap_values=bootstrap_values)


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
    return turn_sums(torch.where(last, to_go, rewards), turn_ids, mask, cu_seqlens)


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
