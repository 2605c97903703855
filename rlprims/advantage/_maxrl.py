"""See :func:`maxrl`."""

import torch

from rlprims.advantage._responses import response_scores
from rlprims.grouping import group_centred, group_mean
from rlprims.layout import to_tokens
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask


def maxrl(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    eps: float = 1e-6,
) -> PerToken:
    """Maximum-likelihood RL (arXiv:2602.02710): the centred reward over the group's mean reward.

    A_i = (s_i − μ) / (μ + ε) with s_i = Σ_t r_it. For rewards of 0 and 1 a prompt of which p is right weighs 1/p, as in
    the gradient of log p; with GRPO it weighs 1/sqrt(p(1 − p)). With ε = 0 and n samples its expectation is exactly
    the gradient of −Σ_{k<n} (1 − p)^k / k, the first terms of log p.

    The rewards must not be negative: with μ < 0 every sign would turn round. A group with μ <= 0 gets 0 (prime-rl does
    this too; SkyRL divides by μ + 1e-6 whatever its sign, so that rewards of ±1 in balance give advantages of ±1e6).
    Rewards that mix signs and still have μ > 0 are not refused, since that would read values: shift them beforehand.

    Args:
        rewards: float (B, T) or (N,), per token; of a response, at least 0.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.
        valid_rows: bool (B,), rows that count; the others are in no statistic and get 0. None: all.
        eps: ε, in units of the reward; 0 in prime-rl.

    Returns:
        float, like rewards; 0 outside the mask, in groups of one or of equal rewards, and where μ <= 0.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> m = torch.ones(4, 1, dtype=torch.bool)
    >>> maxrl(torch.tensor([[1.0], [0.0], [0.0], [0.0]]), torch.zeros(4, dtype=torch.int64), m, eps=0.0).T
    tensor([[ 3., -1., -1., -1.]])
    """
    s, response_mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    mean = group_mean(s, group_ids, valid_rows)
    positive = ~(mean <= 0)  # a mean that is NaN is the caller's, and stays
    a = group_centred(s, group_ids, valid_rows) / torch.where(positive, mean + eps, 1.0)
    return to_tokens(torch.where(positive, a, 0.0), response_mask, cu_seqlens)
