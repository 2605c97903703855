"""See :func:`gae`."""

from functools import partial

import torch
from torch import Tensor

from rlprims.blocks import by_blocks, selected
from rlprims.masking import check_sequences, check_tokens
from rlprims.recurrence import skipping_recurrence
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
    less_values: bool = True,
) -> PerToken:
    """:func:`gae` with one λ, or one per token; ``less_values=False`` leaves the λ-returns, gae + values."""
    check_tokens(response_mask, cu_seqlens, rewards=rewards, values=values)
    if bootstrap_values is not None:
        check_sequences(response_mask, cu_seqlens, bootstrap_values=bootstrap_values)
    block = partial(_in_block, gamma=gamma, less_values=less_values)
    return by_blocks(block, (rewards, values, response_mask, lam), cu_seqlens, bootstrap_values)


def _in_block(
    rewards: PerToken,
    values: PerToken,
    mask: TokenMask,
    lam: float | PerToken,
    cu_seqlens: CuSeqlens | None,
    bootstrap_values: PerSequence | None,
    *,
    gamma: float,
    less_values: bool,
) -> PerToken:
    r, v = selected(rewards, mask), selected(values, mask)
    dtype = torch.promote_types(r.dtype, v.dtype)
    r, v = r.to(dtype), v.to(dtype)
    # With U_t = (1 − λ) V_{t+1} + λ G_{t+1}, what follows t, this is one linear recurrence without a shifted V:
    #   G_t = r_t + γ U_t    and    U_{t−1} = (1 − λ) V_t + λ r_t + γλ U_t;    masked: U_{t−1} = U_t.
    mixed = torch.lerp(v, r, lam.to(dtype) if isinstance(lam, Tensor) else lam)
    _, what_follows = skipping_recurrence(gamma * lam, mixed, mask, bootstrap_values, cu_seqlens)
    here = (r - v).add_(what_follows, alpha=gamma) if less_values else torch.add(r, what_follows, alpha=gamma)
    return selected(here, mask)
