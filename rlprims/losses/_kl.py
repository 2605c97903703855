"""See :func:`kl` and :func:`weighted_kl`."""

from functools import partial

from torch import Tensor

from rlprims.divergence import kl_with_slope
from rlprims.losses._with_slope import with_slope
from rlprims.masking import check_tokens, upcast
from rlprims.ratios import Estimator, log_ratio
from rlprims.types import CuSeqlens, PerToken, TokenMask


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

    With d = log_probs − ref_log_probs: k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d, abs = |d|; see
    :func:`rlprims.divergence.estimate_kl`.

    Value and gradient are chosen apart. For samples of π itself, E[∇k2] is the gradient of KL(π ‖ π_ref); E[∇k1] is 0,
    so k1 as a loss regularizes nothing; E[∇k3] is the gradient of the other direction, KL(π_ref ‖ π). Hence
    ``value="k3", gradient="k2"``, which verl writes ``k3+``. For samples of an older policy see :func:`weighted_kl`.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        ref_log_probs: float, like log_probs: frozen reference.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.
        value: estimator of the value.
        gradient: estimator whose gradient is used; None: the value's own.

    Returns:
        float in nats, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; an unknown estimator.

    >>> import torch
    >>> kl(torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.tensor([[True]]), value="k3")
    tensor([[0.3679]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, ref_log_probs=ref_log_probs)
    rule = partial(_estimate, value=value, gradient=value if gradient is None else gradient)
    return with_slope(rule, response_mask, log_probs, ref_log_probs)


def _estimate(
    log_probs: Tensor, ref_log_probs: Tensor, *, value: Estimator, gradient: Estimator
) -> tuple[Tensor, Tensor]:
    from_ref = upcast(log_probs) - upcast(ref_log_probs)
    estimate, slope = kl_with_slope(from_ref, value)
    return estimate, slope if gradient == value else kl_with_slope(from_ref, gradient)[1]


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

    With ρ = exp(log_probs − old_log_probs): ρ times the estimator of :func:`kl`, and the gradient passes through both.
    With k1 or k3 its mean over samples of the old policy is the KL of the next token, and the mean of its gradient is
    that KL's gradient: no straight-through needed. k2 and abs are biased here as they are there.

    On policy ρ is 1 but its gradient is not 0, so this still differs from :func:`kl`: it adds the score-function term
    that NeMo-RL adds. TRL multiplies k3 by the ratio of its policy loss by default. Neither the ratio nor the KL is
    cut as a policy loss is; log-ratios are clamped to ±20 before ``exp``.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        old_log_probs: float, like log_probs: the policy that the samples are taken as samples of.
        ref_log_probs: float, like log_probs: frozen reference.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.
        value: estimator that is weighted.

    Returns:
        float in nats, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; an unknown estimator.

    >>> import torch
    >>> now, then, ref = torch.tensor([[0.5, 0.2, 0.25]]).log().T
    >>> weighted_kl(now[:, None], then[:, None], ref[:, None], torch.tensor([[True]]), value="k1")  # 2.5 log 2
    tensor([[1.7329]])
    """
    check_tokens(
        response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs
    )
    ratio = log_ratio(log_probs, old_log_probs, response_mask).exp()
    return ratio * kl(log_probs, ref_log_probs, response_mask, cu_seqlens, value=value)
