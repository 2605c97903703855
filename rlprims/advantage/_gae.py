"""See :func:`gae`."""

import torch
from torch import Tensor

from rlprims.masking import check_sequences, check_tokens, row_blocks, zero_outside
from rlprims.recurrence import reverse_recurrence
from rlprims.types import CuSeqlens, PerSequence, PerToken, TokenMask


def gae(
    rewards: PerToken,
    values: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    bootstrap_values: PerSequence | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> PerToken:
    """Generalized advantage estimation, Schulman et al. 2016 (arXiv:1506.02438), eqs. 10 and 16.

    δ_t = r_t + γ V_{t+1} − V_t and A_t = δ_t + γλ A_{t+1}, over the valid tokens of each sequence; beyond the last one
    V is ``bootstrap_values`` (0 by default) and A is 0. Not whitened: see :func:`whiten`.

    Masked tokens (tool output) are skipped: t+1 is the next valid token, so the result equals that of the sequence
    without them. Peers disagree: verl 0.9 and NeMo-RL skip too; OpenRLHF sets those values to 0 and discounts across
    them, slime and SkyRL let the critic's values of tool tokens in.

    Args:
        rewards, values: float (B, T) or (N,), per token.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.
        bootstrap_values: float (B,), V of what would have followed the last token: for truncated responses, 0 for
            those that ended. Truncation is not termination; None treats it as if it were.
        gamma: discount per valid token.
        lam: λ, from one-step errors (0) to Monte-Carlo returns (1); :func:`length_adaptive_gae` has one per response.

    Returns:
        float, like rewards; 0 outside the mask. A critic's target is ``advantages + values``, or, with a λ of its own,
        :func:`td_lambda`.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> m = torch.tensor([[True, True, False, True]])
    >>> v = torch.tensor([[0.1, 0.2, 9.0, 0.4]])
    >>> gae(torch.tensor([[0.0, 0.0, 9.0, 1.0]]), v, m, lam=0.5)
    tensor([[0.3500, 0.5000, 0.0000, 0.6000]])
    """
    return gae_of(rewards, values, response_mask, cu_seqlens, bootstrap_values, gamma=gamma, lam=lam)


def gae_of(
    rewards: PerToken,
    values: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None,
    bootstrap_values: PerSequence | None,
    *,
    gamma: float,
    lam: float | PerToken,
) -> PerToken:
    """:func:`gae` with one λ, or one per token."""
    check_tokens(response_mask, cu_seqlens, rewards=rewards, values=values)
    if bootstrap_values is None:
        bootstrap_values = rewards.new_zeros(len(rewards) if cu_seqlens is None else len(cu_seqlens) - 1)
    check_sequences(response_mask, cu_seqlens, bootstrap_values=bootstrap_values)
    tensors = (rewards, values, response_mask, bootstrap_values)
    if cu_seqlens is not None:
        return _advantages(*tensors, cu_seqlens, gamma=gamma, lam=lam)
    blocks = [
        _advantages(*(x[rows] for x in tensors), gamma=gamma, lam=lam[rows] if isinstance(lam, Tensor) else lam)
        for rows in row_blocks(rewards)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _advantages(
    rewards: PerToken,
    values: PerToken,
    mask: TokenMask,
    bootstrap_values: PerSequence,
    cu_seqlens: CuSeqlens | None = None,
    *,
    gamma: float,
    lam: float | PerToken,
) -> PerToken:
    r, v = zero_outside(rewards, mask), zero_outside(values, mask)
    dtype = torch.promote_types(r.dtype, v.dtype)
    r, v = r.to(dtype), v.to(dtype)
    # With W_t = γ V_{t+1} + γλ A_{t+1}, what follows t, this is one linear recurrence without a shifted V:
    #   A_t = r_t − V_t + W_t    and    W_{t−1} = γλ W_t + γ V_t + γλ (r_t − V_t);    masked: W_{t−1} = W_t.
    carried = gamma * lam * torch.ones_like(r)
    coefficient = torch.where(mask, carried, 1.0)
    addend = gamma * v + carried * (r - v)
    _, what_follows = reverse_recurrence(coefficient, addend, gamma * bootstrap_values.to(dtype), cu_seqlens)
    return zero_outside(r - v + what_follows, mask)
