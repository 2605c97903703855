"""See :func:`td_lambda`."""

from rlprims.advantage._gae import gae_of
from rlprims.types import CuSeqlens, PerSequence, PerToken, TokenMask


def td_lambda(
    rewards: PerToken,
    values: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    bootstrap_values: PerSequence | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> PerToken:
    """λ-returns, Sutton & Barto 2018, eq. 12.20: what a critic learns under TD(λ).

    G_t = r_t + γ ((1 − λ) V_{t+1} + λ G_{t+1}) over the valid tokens of each sequence; beyond the last one V and G are
    ``bootstrap_values`` (0 by default). λ = 0 is the one-step target, λ = 1 the discounted return. It is
    ``gae(...) + values``; a function of its own lets the critic have another λ than the policy. VAPO (Yue et al. 2025,
    arXiv:2504.05118) has 1 for the critic and :func:`length_adaptive_gae` for the policy.

    Args:
        rewards, values: float (B, T) or (N,), per token.
        response_mask: bool, like rewards. Masked tokens are skipped, as in :func:`gae`.
        cu_seqlens: int (B+1,) if packed.
        bootstrap_values: float (B,), V of what would have followed the last token; None: every response ended.
        gamma: discount per valid token.
        lam: λ.

    Returns:
        float, like rewards: returns, not advantages; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> import torch
    >>> m = torch.tensor([[True, False, True]])
    >>> td_lambda(torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[0.3, 9.0, 0.5]]), m, lam=0.5)
    tensor([[0.7500, 0.0000, 1.0000]])
    """
    return gae_of(rewards, values, response_mask, cu_seqlens, bootstrap_values, gamma=gamma, lam=lam, less_values=False)
