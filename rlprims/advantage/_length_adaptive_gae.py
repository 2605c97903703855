"""See :func:`length_adaptive_gae`."""

from rlprims.advantage._gae import gae_of
from rlprims.layout import sequence_lengths, to_tokens
from rlprims.masking import check_tokens, upcast
from rlprims.types import CuSeqlens, PerSequence, PerToken, TokenMask


def length_adaptive_gae(
    rewards: PerToken,
    values: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    bootstrap_values: PerSequence | None = None,
    *,
    gamma: float = 1.0,
    alpha: float = 0.05,
) -> PerToken:
    """GAE with a λ for each response, VAPO, Yue et al. 2025 (arXiv:2504.05118): λ = 1 − 1 / (α l).

    l is the number of valid tokens. What a reward on the last token leaves for the first is λ^l, which vanishes with l
    if λ is fixed; here it is about exp(−1/α) for every length. A response of up to 1/α tokens has λ = 0, as in NeMo-RL:
    the formula is negative there.

    VAPO's critic learns from λ = 1: its target is ``td_lambda(..., lam=1.0)`` and not these advantages + values. λ
    knows how the response went on, so that even with the true values the estimate can be biased.

    Args:
        rewards, values: float (B, T) or (N,), per token.
        response_mask: bool, like rewards. Masked tokens are skipped, as in :func:`gae`, and are not counted in l.
        cu_seqlens: int (B+1,) if packed.
        bootstrap_values: float (B,), V of what would have followed the last token; None: every response ended.
        gamma: discount per valid token.
        alpha: α, per token.

    Returns:
        float, like rewards; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; α that is not positive.

    >>> import torch
    >>> m = torch.tensor([[True, True, True, True], [True, True, False, False]])
    >>> r = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
    >>> length_adaptive_gae(r, torch.zeros(2, 4), m, alpha=0.5)  # λ is 1/2 and 0
    tensor([[0.1250, 0.2500, 0.5000, 1.0000],
            [0.0000, 1.0000, 0.0000, 0.0000]])
    """
    if not alpha > 0:
        raise ValueError(f"alpha is {alpha}, needs more than 0: λ is 1 − 1 / (alpha · length)")
    check_tokens(response_mask, cu_seqlens, rewards=rewards)
    lengths = sequence_lengths(response_mask, cu_seqlens).to(upcast(rewards).dtype)
    lam = to_tokens(1 - 1 / (alpha * lengths).clamp(min=1.0), response_mask, cu_seqlens)
    return gae_of(rewards, values, response_mask, cu_seqlens, bootstrap_values, gamma=gamma, lam=lam)
