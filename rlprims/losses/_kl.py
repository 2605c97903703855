"""KL divergences estimated from the log-probs of the sampled tokens."""

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.losses._weighted import reinforce
from rlprims.masking import check_above, check_choice, check_tokens, upcast, zero_outside
from rlprims.ratios import Estimator, estimate_kl, log_ratio
from rlprims.types import CuSeqlens, PerToken, TokenMask, token_wise


@described
@token_wise
def kl(
    log_probs: PerToken,
    ref_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    value: Estimator = "k3",
    gradient: Estimator | None = None,
) -> PerToken:
    """Per-token estimate of KL(π ‖ π_ref) from the sampled token, Schulman 2020 (joschu.net/blog/kl-approx.html).

    With d = log_probs − ref_log_probs in nats: k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d, abs = |d|.

    Value and gradient can have different estimators. For samples of π itself, E[∇k2] is the gradient of KL(π ‖ π_ref).
    E[∇k1] is 0, so k1 as a loss has no effect. E[∇k3] is the gradient of KL(π_ref ‖ π), the other direction. To use the
    value of k3 with the gradient of KL(π ‖ π_ref), set ``value="k3", gradient="k2"`` (verl: ``k3+``). For samples of an
    older policy see :func:`weighted_kl`. ``gradient=None`` is the same estimator as ``value``.

    >>> kl(torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.tensor([[True]]), value="k3")
    tensor([[0.3679]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, ref_log_probs=ref_log_probs)
    gradient = value if gradient is None else gradient
    check_choice("value", value, Estimator)
    check_choice("gradient", gradient, Estimator)

    d = zero_outside(upcast(log_probs) - upcast(ref_log_probs).detach(), response_mask)
    if gradient == value:
        return estimate_kl(d, value)
    return _straight_through(estimate_kl(d, value), estimate_kl(d, gradient))


def _straight_through(x: Tensor, y: Tensor) -> Tensor:
    """The value of ``x`` with the gradient of ``y``; no gradient where ``y`` is infinite."""
    y = torch.where(y.isinf(), 0.0, y)  # inf - inf would be NaN
    return x.detach() + (y - y.detach())


@described
@token_wise
def weighted_kl(
    log_probs: PerToken,
    old_log_probs: PerToken,
    ref_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    value: Estimator = "k3",
) -> PerToken:
    """KL(π ‖ π_ref) from samples of an older policy: the "unbiased KL estimate" of DeepSeek-V3.2 (arXiv:2512.02556).

    With ρ = exp(log_probs − old_log_probs): ρ times the estimator of :func:`kl`, with a gradient through both factors.
    With k1 or k3 its mean over samples of the old policy is the KL of the next token, and the mean of its gradient is
    the gradient of that KL. k2 and abs are biased, as in :func:`kl`.

    On policy ρ is 1 but its gradient is not 0, so this differs from :func:`kl` by the score-function term, which
    NeMo-RL also has. TRL multiplies k3 by the ratio of its policy loss by default. Neither ρ nor the KL is clipped.

    >>> p, old, ref = torch.tensor([[0.5, 0.2, 0.25]]).log().T
    >>> weighted_kl(p[:, None], old[:, None], ref[:, None], torch.tensor([[True]]), value="k1")  # 2.5 log 2
    tensor([[1.7329]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs)
    ratio = log_ratio(log_probs, old_log_probs, response_mask).exp()
    return ratio * kl(log_probs, ref_log_probs, response_mask, cu_seqlens, value=value)


@described
@token_wise
def sampled_reverse_kl(
    log_probs: PerToken, teacher_log_probs: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None
) -> PerToken:
    """On-policy distillation, Agarwal et al. 2023 (arXiv:2306.13649), from the log-prob of the sampled token.

    :func:`reinforce` with the constant A = teacher_log_probs − log_probs: loss = −A log π. For samples of the student
    the expected gradient is that of KL(student ‖ teacher) of the next token. The value of the loss is not a divergence:
    to log one, use :func:`kl` with k1. The advantage of a token is only its own log-ratio, without those of later
    tokens. For samples of an older policy use teacher_log_probs − old_log_probs as the advantages of
    ``clipped_surrogate`` or ``cispo``. Both log-probs must be computed at the sampler's temperature.

    >>> x = torch.tensor([[-2.0]], requires_grad=True)
    >>> sampled_reverse_kl(x, torch.tensor([[-1.5]]), torch.tensor([[True]])).sum().backward()
    >>> x.grad  # a step against it raises the log-prob
    tensor([[-0.5000]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, teacher_log_probs=teacher_log_probs)
    advantages = upcast(teacher_log_probs) - upcast(log_probs).detach()
    return reinforce(log_probs, advantages, response_mask, cu_seqlens)


@described
@token_wise
def sdar(
    log_probs: PerToken,
    teacher_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    beta: float = 5.0,
) -> PerToken:
    """Gated distillation, SDAR, Lu et al. 2026 (arXiv:2605.15155): loss = σ(β g) g with g = log π_T − log π.

    The gate σ(β g), of steepness β > 0 per nat, is a constant, so the gradient is that of −σ(β g) log π. A token that
    the teacher finds less likely has almost no gradient. Add a policy loss: alone this makes all tokens more likely.

    Args:
        beta: the steepness of the gate, per nat; above 0.

    >>> x = torch.tensor([[-2.0, -1.0]], requires_grad=True)
    >>> sdar(x, torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool)).sum().backward()
    >>> x.grad  # the teacher finds the first token more likely, the second less likely
    tensor([[-0.9933, -0.0067]])
    """
    check_above(0, ": the steepness of the gate", beta=beta)
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, teacher_log_probs=teacher_log_probs)
    gap = zero_outside(upcast(teacher_log_probs).detach() - upcast(log_probs), response_mask)
    return (beta * gap.detach()).sigmoid() * gap
