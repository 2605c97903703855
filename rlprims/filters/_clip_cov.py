"""See :func:`clip_cov`."""

import torch
from torch import Tensor

from rlprims.filters._covariance import token_covariance
from rlprims.filters._largest import largest, share
from rlprims.masking import check_tokens
from rlprims.types import CuSeqlens, PerToken, TokenMask


def clip_cov(
    log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    fraction: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    generator: torch.Generator | None = None,
) -> TokenMask:
    """Keep all tokens but a few of high covariance, drawn at random: Clip-Cov, Cui et al. 2025 (arXiv:2505.22617).

    Of the tokens with low < (log π − mean log π)(A − mean A) < high, ⌊fraction · valid tokens⌋ are drawn, at least one,
    or all of them if they are fewer; they get no gradient: ``losses * clip_cov(...)``. See :func:`kl_cov` for why.

    Means and number are the whole step's: call this once, before the batch is split. verl and SkyRL take a
    micro-batch's, at least one token in each, and draw from the global generator; they do not draw a token that PPO
    clips already, which before the first update is none.

    The draw is a hash of one number from the generator and of the token's place among the valid ones: the same padded,
    packed, and on every device.

    Args:
        log_probs: float (B, T) or (N,), the policy before the update; a constant here.
        advantages: float, like log_probs.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed; the means do not need it.
        fraction: the share of all tokens to drop, above 0 and at most 1.
        low, high: the band of covariance to draw from, in units of the advantage.
        generator: what to draw from; on any device.

    Returns:
        bool, like log_probs: True where kept; False where drawn, and outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; a fraction outside (0, 1]; low >= high; no generator.

    >>> m = torch.ones(1, 4, dtype=torch.bool)
    >>> log_probs, advantages = torch.tensor([[-0.1, -3.0, -0.1, -3.0], [2.0, 1.0, -1.0, -1.0]])[:, None]
    >>> clip_cov(log_probs, advantages, m, generator=torch.Generator().manual_seed(0)).tolist()
    [[True, True, True, False]]
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, advantages=advantages)
    if not 0 < fraction <= 1 or low >= high:
        raise ValueError(f"fraction={fraction} must be above 0 and at most 1, and low={low} below high={high}")
    if generator is None:
        raise ValueError("generator is None: pass a torch.Generator, so that the draw can be repeated")
    covariance = token_covariance(log_probs, advantages, response_mask)
    band = response_mask & (low < covariance) & (covariance < high)
    seed = torch.randint(2**62, (1,), generator=generator, device=generator.device).to(response_mask.device)
    drawn = largest(_noise(seed, response_mask), band, share(response_mask, fraction).clamp(min=1))
    return response_mask & ~drawn


def _noise(seed: Tensor, mask: TokenMask) -> Tensor:
    """An int64 for each valid token, all different: Weyl's sequence, mixed as in splitmix64 (Steele et al. 2014)."""
    x = seed + mask.flatten().cumsum(0) * -7046029254386353131
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return (x ^ (x >> 31)).reshape(mask.shape)
