"""Transforms of advantages: whitening over the batch, REINFORCE++, which uses it, clipping, and weights by sign."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.advantage._group import Singleton, grpo, tokens_of_valid_rows
from rlprims.advantage._returns import discounted_returns
from rlprims.masking import batch_moments, check_choice, check_deviation, check_finite, check_tokens, zero_outside
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask


@described
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

    PPO implementations normalize so since Dhariwal et al. 2017 (baselines), and REINFORCE++ (arXiv:2501.03262, eq. 7).
    σ² is computed in two passes with divisor N − ddof. ε is in units of A². With fewer than two valid tokens all get 0.

    Where sources disagree: ddof is 1 in verl, TRL, SkyRL, ROLL; 0 in OpenRLHF and NeMo-RL's REINFORCE++. ε is added to
    σ² only; OpenRLHF uses max(σ², ε). In verl, TRL, SkyRL and ROLL masked tokens get −μ/σ, and a single valid token
    raises an error or gives NaN; here both get 0.

    >>> whiten(torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3, dtype=torch.bool))
    tensor([[-0.8729, -0.2182,  1.0911]])
    """
    check_tokens(response_mask, cu_seqlens, advantages=advantages)
    check_deviation(ddof, eps=eps)
    moments = batch_moments(advantages, response_mask, ddof=ddof, all_reduce=all_reduce)
    denominator = moments.variance + eps
    is_defined = denominator != 0
    scale = torch.where(is_defined, denominator, 1.0).rsqrt().to(moments.centred.dtype)
    return zero_outside(moments.centred * scale, response_mask & is_defined)


@described
def reinforce_pp(
    rewards: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    gamma: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-8,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> PerToken:
    """REINFORCE++, Hu 2025 (arXiv:2501.03262), eq. 7: the reward-to-go, whitened over the batch.

    R_t = r_t + γ R_{t+1} over the valid tokens of each sequence, and A = (R − μ) / sqrt(σ² + ε) over all valid tokens
    of the batch: :func:`whiten` after :func:`discounted_returns`. The paper's reward has −β KL_t on every token and the
    score on the last token: compute it with ``rewards.kl_penalty``.

    Where sources disagree: the return skips masked tokens (tool output), as in verl 0.9 and OpenRLHF. SkyRL masks the
    return, so tokens before a tool call get no credit for later rewards. NeMo-RL subtracts a token's KL from that token
    only, not from earlier returns. ddof is 1 in verl and SkyRL, 0 in OpenRLHF and NeMo-RL.

    Args:
        eps: ε, in units of the reward squared.

    >>> m = torch.tensor([[True, False, True], [True, True, False]])
    >>> reinforce_pp(torch.tensor([[0.0, 9.0, 1.0], [0.0, -1.0, 9.0]]), m)
    tensor([[ 0.8660,  0.0000,  0.8660],
            [-0.8660, -0.8660,  0.0000]])
    """
    returns = discounted_returns(rewards, response_mask, cu_seqlens, gamma=gamma)
    return whiten(returns, response_mask, cu_seqlens, ddof=ddof, eps=eps, all_reduce=all_reduce)


@described
def reinforce_pp_baseline(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    singleton: Singleton = "zero",
    ddof: int = 1,
    eps: float = 1e-8,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> PerToken:
    """REINFORCE++-baseline, Hu et al. 2025 (arXiv:2501.03262, version 3): centred by group, whitened over the batch.

    x_i = s_i − μ_group on each of the response's tokens, with s_i = Σ_t r_it, and A = (x − μ) / sqrt(σ² + ε) over all
    valid tokens of the batch: :func:`whiten` after ``grpo(normalize_std=False)``. Lengths differ, so μ is not 0, and a
    group of equal rewards gets −μ/σ, a small number. ddof is 1 in verl, 0 in OpenRLHF and NeMo-RL. Other libraries
    divide by the deviation over the responses and do not centre again: that is ``grpo(std_over="batch_centred")``.

    Args:
        eps: ε, in units of the reward squared.

    >>> m = torch.ones(4, 1, dtype=torch.bool)
    >>> reinforce_pp_baseline(torch.tensor([[1.0], [0.0], [5.0], [2.0]]), torch.tensor([0, 0, 1, 1]), m).T
    tensor([[ 0.3873, -0.3873,  1.1619, -1.1619]])
    """
    check_choice("singleton", singleton, Singleton)
    check_tokens(response_mask, cu_seqlens, rewards=rewards)
    response_mask = tokens_of_valid_rows(response_mask, group_ids, cu_seqlens, valid_rows)
    centred = grpo(rewards, group_ids, response_mask, cu_seqlens, valid_rows, normalize_std=False, singleton=singleton)
    return whiten(centred, response_mask, cu_seqlens, ddof=ddof, eps=eps, all_reduce=all_reduce)


@described
def clip_advantages(
    advantages: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None, *, low: float, high: float
) -> PerToken:
    """Advantages clipped to [low, high]. Used after a normalization, it limits the influence of one response.

    These are NeMo-RL's ``advantage_clip_low`` and ``advantage_clip_high``; ROLL's ``advantage_clip`` is ±c. Clipping
    biases the gradient, and bounds that are not symmetric also shift the mean. Masked tokens stay 0 for any bounds.

    Args:
        low, high: bounds, in units of the advantage, low <= high; ``-inf`` or ``inf`` for none.

    >>> clip_advantages(torch.tensor([[-9.0, 0.5, 9.0]]), torch.ones(1, 3, dtype=torch.bool), low=-5.0, high=2.0)
    tensor([[-5.0000,  0.5000,  2.0000]])
    """
    if not low <= high:
        raise ValueError(f"low={low} and high={high}, expected low <= high")
    check_tokens(response_mask, cu_seqlens, advantages=advantages)
    return zero_outside(zero_outside(advantages, response_mask).clamp(low, high), response_mask)


@described
def weight_by_sign(
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    positive: float = 0.1,
    negative: float = 1.0,
) -> PerToken:
    """Advantages weighted by their sign: W-REINFORCE, Zhu et al. 2025 (arXiv:2506.01347).

    positive · A if A > 0, else negative · A. The paper's weighted REINFORCE has λ = 0.1 for correct answers and 1 for
    wrong ones, and rewards of ±1 without a baseline as advantages. ``positive=0`` is its negative-sample reinforcement
    (NSR), ``negative=0`` its positive-sample reinforcement (PSR).

    >>> weight_by_sign(torch.tensor([[2.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool))
    tensor([[ 0.2000, -2.0000]])
    """
    check_finite(positive=positive, negative=negative)
    check_tokens(response_mask, cu_seqlens, advantages=advantages)
    a = zero_outside(advantages, response_mask)
    return torch.where(a > 0, positive * a, negative * a)
