"""See :func:`opsm`."""

from rlprims.corrections._weights import Weights
from rlprims.layout import lengths_of_tokens
from rlprims.masking import check_tokens, zero_outside
from rlprims.ratios import summed_log_ratio
from rlprims.types import CuSeqlens, PerToken, TokenMask


def opsm(
    log_probs: PerToken,
    rollout_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    delta: float,
) -> Weights:
    """Off-policy sequence masking, DeepSeek-V3.2 (arXiv:2512.02556): unlearn only what the policy would still say.

    A token with a negative advantage is dropped if the mean of rollout_log_probs − log_probs over its response is above
    δ. Bad responses of a policy that has moved away have large, noisy gradients; good ones are kept however far.

    The paper measures from the sampler, so that staleness and the sampler's numerics both count. To measure staleness
    alone, give ``old_log_probs`` as ``rollout_log_probs``. TRL gives 0.5 as an example of δ, slime 1e-4.

    Args:
        log_probs: float (B, T) or (N,), current policy; a constant here.
        rollout_log_probs: float, like log_probs: the policy that sampled.
        advantages: float, like log_probs.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed.
        delta: δ, the largest mean log-ratio at which a token with a negative advantage is kept, in nats; at least 0.

    Returns:
        Weights of 1 where kept and 0 elsewhere, which account for no gap.

    Raises:
        ValueError: shapes or dtypes that do not fit; a negative delta.

    >>> import torch
    >>> now, sampler, advantages = torch.tensor([[-2.0, -1.0], [-1.0, -1.0], [1.0, -1.0]])[:, :, None]
    >>> opsm(now, sampler, advantages, torch.ones(2, 1, dtype=torch.bool), delta=0.5).values.T
    tensor([[1., 1.]])
    >>> opsm(now, sampler, -advantages, torch.ones(2, 1, dtype=torch.bool), delta=0.5).values.T
    tensor([[0., 1.]])
    """
    check_tokens(
        response_mask, cu_seqlens, log_probs=log_probs, rollout_log_probs=rollout_log_probs, advantages=advantages
    )
    if delta < 0:
        raise ValueError(f"delta={delta} must be at least 0, in nats")
    total = summed_log_ratio(rollout_log_probs, log_probs, response_mask, cu_seqlens).detach()
    near = total / lengths_of_tokens(response_mask, cu_seqlens) <= delta
    kept = response_mask & (near | (zero_outside(advantages, response_mask) >= 0))
    return Weights(kept.to(total.dtype))
