"""See :func:`whiten`."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlprims.advantage._moments import moments
from rlprims.blocks import joined
from rlprims.masking import check_tokens, row_blocks
from rlprims.types import CuSeqlens, PerToken, TokenMask


def whiten(
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    ddof: int = 1,
    eps: float = 1e-8,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> PerToken:
    """Whitening over all valid tokens of the batch: (A − μ) / sqrt(σ² + ε).

    The normalization of PPO implementations since Dhariwal et al. 2017 (baselines); REINFORCE++ (arXiv:2501.03262,
    eq. 7). σ² is two-pass with divisor N − ddof. Sources differ in ddof: 1 in verl, TRL, SkyRL, ROLL; 0 in OpenRLHF
    and NeMo-RL's REINFORCE++. Those peers leave −μ/σ on the masked tokens or raise on a single one; here it is 0.

    Args:
        advantages: float (B, T) or (N,).
        response_mask: bool, like advantages.
        cu_seqlens: int (B+1,) if packed; the statistics do not need it.
        ddof: σ's divisor is N − ddof.
        eps: ε, in units of A².
        all_reduce: sums a tensor over the ranks that share the batch; None: this tensor is the batch.

    Returns:
        float, like advantages: mean 0 and variance 1 over the valid tokens, 0 outside the mask; all 0 if there are
        fewer than two valid tokens.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> whiten(torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3, dtype=torch.bool))
    tensor([[-0.8729, -0.2182,  1.0911]])
    """
    check_tokens(response_mask, cu_seqlens, advantages=advantages)
    m = moments(advantages, response_mask, ddof=ddof, all_reduce=all_reduce)
    spread = m.variance + eps
    scale = torch.where((m.size > 1) & (spread != 0), spread.rsqrt(), 0.0)
    pieces = (m.centred(advantages[rows], response_mask[rows]).mul_(scale) for rows in row_blocks(advantages))
    return joined(pieces, advantages)
