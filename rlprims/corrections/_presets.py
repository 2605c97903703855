"""Corrections under their common names: :func:`importance_weights` and :func:`rejection` with the bounds of a source.

In the formulas d_t = old_log_probs − rollout_log_probs. The exponent of an importance weight is clamped to ±20. The
results are 0 outside the mask and have no gradient. Arguments and errors are those of the two functions. To combine
corrections, multiply them: verl's ``decoupled_geo_rs_seq_tis`` is
``importance_weights(..., level="sequence") * geometric_gate(...)``.
"""

from rlprims._described import described
from rlprims.corrections._gates import rejection
from rlprims.corrections._weights import Weights, importance_weights
from rlprims.types import AllReduce, CuSeqlens, PerToken, TokenMask


@described
def tis(
    old_log_probs: PerToken,
    rollout_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    high: float = 2.0,
) -> Weights:
    """Truncated importance sampling, Yao et al. 2025 (fengyao.notion.site/off-policy-rl): w_t = min(exp(d_t), high).

    >>> import torch
    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> tis(torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.3, 0.2]]).log(), m).values
    tensor([[2.0000, 0.5000]])
    """
    return importance_weights(old_log_probs, rollout_log_probs, response_mask, cu_seqlens, high=high)


@described
def icepop(
    old_log_probs: PerToken,
    rollout_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> Weights:
    """IcePop, Ling team 2025 (arXiv:2510.18855): w_t = exp(d_t) if low <= exp(d_t) <= high, else 0.

    >>> import torch
    >>> m = torch.ones(1, 3, dtype=torch.bool)
    >>> icepop(torch.tensor([[0.9, 0.6, 0.1]]).log(), torch.tensor([[0.1, 0.3, 0.3]]).log(), m).values
    tensor([[0.0000, 2.0000, 0.0000]])
    """
    data = old_log_probs, rollout_log_probs, response_mask, cu_seqlens
    return importance_weights(*data, action="mask", low=low, high=high)


@described
def mis(
    old_log_probs: PerToken,
    rollout_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    high: float = 3.0,
    all_reduce_rows: AllReduce | None = None,
) -> Weights:
    """Masked importance sampling of responses, TRL's default mode: w = exp(Σ_t d_t) if it is at most ``high``, else 0.

    Each token of the response has this weight. The product of the ratios is exponential in the length, so long
    responses are masked for a small gap per token: see :func:`geometric_gate`.

    >>> import torch
    >>> trainer, sampler = torch.tensor([[0.6, 0.2], [0.6, 0.4]]).log(), torch.full((2, 2), 0.2).log()
    >>> mis(trainer, sampler, torch.ones(2, 2, dtype=torch.bool), high=4.0).values
    tensor([[3., 3.],
            [0., 0.]])
    """
    data = old_log_probs, rollout_log_probs, response_mask, cu_seqlens
    return importance_weights(*data, level="sequence", action="mask", high=high, all_reduce_rows=all_reduce_rows)


@described
def geometric_gate(
    old_log_probs: PerToken,
    rollout_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    low: float = 0.999,
    high: float = 1.001,
    all_reduce_rows: AllReduce | None = None,
) -> Weights:
    """Keep responses by the geometric mean of their ratios: w = 1 if low <= exp(mean_t d_t) <= high, else 0.

    The mean does not depend on the length. The bounds are verl's; NeMo-RL keeps up to 1.002, SkyRL 0.99 to 1.01.

    >>> import torch
    >>> trainer, sampler = torch.tensor([[0.5, 0.2], [0.6, 0.2]]).log(), torch.tensor([[0.4, 0.25], [0.5, 0.2]]).log()
    >>> geometric_gate(trainer, sampler, torch.ones(2, 2, dtype=torch.bool)).values
    tensor([[1., 1.],
            [0., 0.]])
    """
    data = old_log_probs, rollout_log_probs, response_mask, cu_seqlens
    return rejection(*data, estimator="k1", low=low, high=high, all_reduce_rows=all_reduce_rows)


@described
def seq_mask_tis(
    old_log_probs: PerToken,
    rollout_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    low: float = 0.999,
    high: float = 1.002,
    all_reduce_rows: AllReduce | None = None,
) -> Weights:
    """w_t = exp(d_t) in responses with low <= exp(mean_t d_t) <= high, else 0: OpenRLHF's and NeMo-RL's.

    The bounds are those of both libraries. They do not bound w_t itself; here the clamped exponent does.

    >>> import torch
    >>> trainer, sampler = torch.tensor([[0.5, 0.2], [0.6, 0.2]]).log(), torch.tensor([[0.4, 0.25], [0.5, 0.2]]).log()
    >>> seq_mask_tis(trainer, sampler, torch.ones(2, 2, dtype=torch.bool)).values
    tensor([[1.2500, 0.8000],
            [0.0000, 0.0000]])
    """
    data = old_log_probs, rollout_log_probs, response_mask, cu_seqlens
    return tis(*data, high=float("inf")) * geometric_gate(*data, low=low, high=high, all_reduce_rows=all_reduce_rows)


@described
def token_veto(
    old_log_probs: PerToken,
    rollout_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    low: float = 1e-4,
    high: float = 100.0,
    all_reduce_rows: AllReduce | None = None,
) -> Weights:
    """Drop a response because of one token: w = 1 if low <= exp(d_t) <= high for all of its tokens t, else 0.

    The bounds are SkyRL's. One such token shows that the sampler computed another distribution.

    >>> import torch
    >>> m = torch.ones(2, 2, dtype=torch.bool)
    >>> token_veto(torch.tensor([[-1.0, -1.0], [-1.0, -12.0]]), torch.full((2, 2), -1.0), m).values
    tensor([[1., 1.],
            [0., 0.]])
    """
    data = old_log_probs, rollout_log_probs, response_mask, cu_seqlens
    return rejection(*data, estimator="k1", statistic="max", low=low, high=high, all_reduce_rows=all_reduce_rows)
