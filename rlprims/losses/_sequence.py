"""Policy losses with a ratio or a distance of the whole response: GSPO, GMPO and mirror descent."""

from typing import Literal, TypeAlias

import torch

from rlprims._described import described
from rlprims.layout import expand_to_tokens, lengths_of_tokens, sequence_lengths, sequence_sum
from rlprims.losses._clipped import check_clip
from rlprims.masking import check_above, check_at_least, check_choice, check_tokens, upcast, zero_outside
from rlprims.ratios import clamp_log_ratio, sequence_log_ratio, summed_log_ratio
from rlprims.types import AllReduce, CuSeqlens, PerToken, TokenMask

RatioMean: TypeAlias = Literal["geometric", "product"]
Level: TypeAlias = Literal["sequence", "token"]


@described
def gspo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    mean: RatioMean = "geometric",
    all_reduce_rows: AllReduce | None = None,
) -> PerToken:
    """Group sequence policy optimization, Zheng et al. 2025 (arXiv:2507.18071), eq. 5: one ratio for each response.

    With s = exp(mean over the response's tokens of log_probs − old_log_probs), the geometric mean of the token ratios:
    loss_t = −min(s A_t, clip(s, 1 − clip_low, 1 + clip_high) A_t). The gradient goes through the mean to every token.

    Aggregate with ``seq_mean_token_mean``, as the paper does; under ``token_mean`` the weight of a response is its
    length. With ``seq_mean_token_sum`` it is LUSPO (arXiv:2602.05261). The defaults are the paper's (section 5.1);
    those of verl, TRL, NeMo-RL and SkyRL are 0.2, which clips almost no response. With ``mean="product"`` instead of
    "geometric", s is the likelihood ratio of the response, and the loss is PPO's with the response as one action:
    TRL's RLOO, with bounds of 0.2. This ratio is exponential in the length, so long responses are clipped first.

    The mean, or the sum, is clamped to ±20; the log-ratios of tokens are not. verl and SkyRL clamp the mean from above
    only, at 10: above it the loss of a response with A < 0 is constant and has no gradient.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> gspo(torch.tensor([[0.2, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2), m, clip_high=0.2)
    tensor([[-1.1052, -1.1052]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_clip(clip_low, clip_high)
    check_choice("mean", mean, RatioMean)

    advantages = zero_outside(advantages, response_mask).detach()  # makes the losses 0 there
    data = log_probs, old_log_probs, response_mask, cu_seqlens
    s = sequence_log_ratio(*data, mean=mean == "geometric", all_reduce_rows=all_reduce_rows).exp()
    clipped_s = s.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(advantages * s, advantages * clipped_s)


@described
def gspo_token(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    all_reduce_rows: AllReduce | None = None,
) -> PerToken:
    """GSPO-token, Zheng et al. 2025 (arXiv:2507.18071), section 4.3: :func:`gspo` with a gradient for each token.

    With s the sequence ratio of :func:`gspo` and s_t = sg(s) · exp(log_probs_t − sg(log_probs_t)), which equals s:
    loss_t = −min(s_t A_t, clip(s_t, 1 − clip_low, 1 + clip_high) A_t). Its gradient is −s A_t at token t only, and 0 if
    clipped. Under ``seq_mean_token_mean`` the gradient is :func:`gspo`'s if A is equal on all tokens of a response;
    here A may differ between tokens. verl, SkyRL and tunix implement this form and call it gspo.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> gspo_token(torch.tensor([[0.2, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2), m, clip_high=0.2)
    tensor([[-1.1052, -1.1052]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_clip(clip_low, clip_high)

    advantages = zero_outside(advantages, response_mask).detach()  # makes the losses 0 there
    constants = log_probs.detach(), old_log_probs, response_mask, cu_seqlens
    s = sequence_log_ratio(*constants, mean=True, all_reduce_rows=all_reduce_rows).exp()
    # A log-prob of −inf is replaced by 0, so that −inf − (−inf) is not NaN; that token gets no gradient.
    log_probs = zero_outside(log_probs, response_mask & (log_probs != -torch.inf))
    s_t = s * (log_probs - log_probs.detach()).exp()
    clipped_s_t = s_t.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(advantages * s_t, advantages * clipped_s_t)


@described
def gmpo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    all_reduce_rows: AllReduce | None = None,
) -> PerToken:
    """Geometric-mean policy optimization, Zhao et al. 2025 (arXiv:2507.20673): clip each token, then average.

    d_t = log_probs − old_log_probs is clipped on the side where PPO clips: d_t <= clip_high if A_t > 0, and
    d_t >= −clip_low if A_t < 0. With ρ = exp(mean of d over the response's tokens): loss_t = −ρ A_t. Under
    ``seq_mean_token_mean`` that is the paper's −ρ A per response. :func:`gspo` averages first and clips the mean. A
    token with A_t = 0 counts in the mean with d_t = 0.

    The bounds are of the log-ratio, at least 0: 0.4 allows ratios in [0.67, 1.49]. The gradient goes through the mean
    to every token that is not clipped. verl ignores its aggregation option here and averages over all rows.

    Args:
        clip_low, clip_high: bounds of the log-ratio below and above 0; at least 0.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> gmpo(torch.tensor([[0.6, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2), m)
    tensor([[-1.2214, -1.2214]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_at_least(0, ": a bound of the log-ratio", inf=True, clip_low=clip_low, clip_high=clip_high)

    advantages = zero_outside(advantages, response_mask).detach()  # makes the losses 0 there
    d = zero_outside(upcast(log_probs) - upcast(old_log_probs).detach(), response_mask)
    clipped_d = torch.where(advantages > 0, d.clamp(max=clip_high), d.clamp(min=-clip_low))
    clipped_d = torch.where(advantages == 0, 0.0, clipped_d)
    lengths = sequence_lengths(response_mask, cu_seqlens, all_reduce_rows=all_reduce_rows).clamp(min=1)
    total = sequence_sum(clipped_d, response_mask, cu_seqlens, all_reduce_rows=all_reduce_rows)
    ratio = clamp_log_ratio(total / lengths).exp()
    return -advantages * expand_to_tokens(ratio, response_mask, cu_seqlens)


@described
def opmd(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    tau: float = 0.1,
    level: Level = "sequence",
    all_reduce_rows: AllReduce | None = None,
) -> PerToken:
    """Online policy mirror descent, Kimi k1.5 2025 (arXiv:2501.12599), section 2.3: REINFORCE plus a squared log-ratio.

    With d_t = log_probs − old_log_probs and D = Σ_t d_t of a response of n tokens: loss_t = −A_t log_probs_t +
    τ/2 D² / n. It sums to the paper's −A log π + τ/2 (log π/π_old)² over a response, so aggregate with
    ``seq_mean_token_sum``. There is no ratio and no clip; the gradient of the regularizer is linear in D.

    With ``level="token"`` instead of "sequence" the second term is τ/2 d_t². That is DRO's loss (Richemond et al. 2024,
    arXiv:2405.19107) in the per-token form of verl and tinker, without the paper's value function. ROLL's Kimi loss is
    per token too. The Kimi paper gives no τ; ROLL's default is 0.1.

    Args:
        old_log_probs: the policy to stay near; in the paper that at the start of the iteration.
        tau: τ > 0, in units of the advantage per nat.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> opmd(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-2.0, -3.0]]), torch.ones(1, 2), m, tau=1.0)
    tensor([[2., 3.]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_choice("level", level, Level)
    check_above(0, "; use losses.reinforce for no regularizer", tau=tau)

    advantages = zero_outside(advantages, response_mask).detach()
    if level == "sequence":
        data = log_probs, old_log_probs, response_mask, cu_seqlens
        total = summed_log_ratio(*data, all_reduce_rows=all_reduce_rows)
        squares = total.square() / lengths_of_tokens(response_mask, cu_seqlens, all_reduce_rows=all_reduce_rows)
    else:
        squares = zero_outside(upcast(log_probs) - upcast(old_log_probs).detach(), response_mask).square()
    return tau / 2 * squares - advantages * zero_outside(log_probs, response_mask)
