"""See :func:`importance_weights`."""

from typing import Literal, TypeAlias

import torch

from rlprims.losses._sequence_ratio import sequence_log_ratio
from rlprims.masking import check_tokens, log_ratio
from rlprims.types import CuSeqlens, PerToken, TokenMask

Level: TypeAlias = Literal["token", "sequence"]
Mean: TypeAlias = Literal["product", "geometric"]
Action: TypeAlias = Literal["truncate", "mask"]


def importance_weights(
    old_log_probs: PerToken,
    rollout_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    level: Level = "token",
    mean: Mean = "product",
    action: Action = "truncate",
    low: float = 0.0,
    high: float = 2.0,
) -> PerToken:
    """Weights for the gap between trainer and sampler: w = π_old / π_rollout, the trainer's over the sampler's.

    Multiply them into a per-token loss before it is aggregated::

        loss = token_mean(clipped_surrogate(...) * importance_weights(...), response_mask)

    They correct a loss whose ratio is to ``old_log_probs``. One that is anchored at ``rollout_log_probs`` already
    (:func:`dppo`, :func:`topr`, :func:`vespo`, :func:`decoupled_ppo`) would be corrected twice.

    ``level`` and ``mean`` say which ratio: each token's own; or one for the response, the product of its tokens' (an
    unbiased weight, exponential in length: 1000 tokens off by 0.002 nats make 7.4), or their geometric mean (1.002).
    ``action`` says what the bounds do: truncate w to [low, high], or set w to 0 outside and leave it inside.

    The defaults are truncated importance sampling (Yao et al. 2025, fengyao.notion.site/off-policy-rl) with the cap of
    verl, slime and open-instruct; TRL's is 3, NeMo-RL's 5. IcePop (Ling team 2025, arXiv:2510.18855) is
    ``action="mask", low=0.5, high=5.0``. TRL's ``sequence_*`` modes are products, ms-swift's are geometric means.
    A geometric gate on token weights (OpenRLHF's and NeMo-RL's seq-mask-tis) is two calls and a ``torch.where``.

    Rejected tokens still count in the denominators of the aggregations, as in every peer, unless you take them out of
    the mask. A NaN from the sampler propagates; TRL makes it a weight of 1.

    Args:
        old_log_probs: float (B, T) or (N,): the trainer's log-probs of the policy that sampled.
        rollout_log_probs: float, like old_log_probs: the sampler's own.
        response_mask: bool, like old_log_probs.
        cu_seqlens: int (B+1,) if packed.
        level: "token" or "sequence".
        mean: "product" or "geometric"; how a sequence's ratios become one.
        action: "truncate" or "mask".
        low, high: bounds of the weight, 0 <= low <= 1 <= high; low = 0 bounds it from above only.

    Returns:
        float, like old_log_probs, never attached to a graph; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; an unknown option; "geometric" for single tokens; bounds that do
            not enclose 1.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> trainer, sampler = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-2.0, -1.0]])
    >>> importance_weights(trainer, sampler, m)
    tensor([[2., 1.]])
    >>> importance_weights(trainer, sampler, m, level="sequence", mean="geometric")
    tensor([[1.6487, 1.6487]])
    """
    check_tokens(response_mask, cu_seqlens, old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"low={low} must be in [0, 1] and high={high} at least 1, the weight where both agree")
    if mean not in ("product", "geometric"):
        raise ValueError(f"unknown mean {mean!r}: choose 'product' or 'geometric'")
    trainer = old_log_probs.detach()
    if level == "sequence":
        geometric = mean == "geometric"
        log_w = sequence_log_ratio(trainer, rollout_log_probs, response_mask, cu_seqlens, mean=geometric)
    elif level == "token":
        if mean != "product":
            raise ValueError(f"mean={mean!r} needs level='sequence': a token's ratio is not averaged")
        log_w = log_ratio(trainer, rollout_log_probs, response_mask)
    else:
        raise ValueError(f"unknown level {level!r}: choose 'token' or 'sequence'")
    weights = log_w.exp()
    if action == "truncate":
        bounded = weights.clamp(low, high)
    elif action == "mask":
        bounded = torch.where((weights < low) | (weights > high), 0.0, weights)
    else:
        raise ValueError(f"unknown action {action!r}: choose 'truncate' or 'mask'")
    return torch.where(response_mask, bounded, 0.0)
