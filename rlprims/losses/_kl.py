"""See :func:`kl`."""

from rlprims.divergence import Estimator, estimate_kl
from rlprims.masking import check_tokens, zero_outside
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
    ``value="k3", gradient="k2"``, which verl writes ``k3+``.

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
    log_ratio = zero_outside(log_probs, response_mask) - zero_outside(ref_log_probs, response_mask).detach()
    estimate = estimate_kl(log_ratio, value)
    if gradient is None or gradient == value:
        return estimate
    carrier = estimate_kl(log_ratio, gradient)
    return estimate.detach() + (carrier - carrier.detach())
