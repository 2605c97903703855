"""See :func:`importance_weights`."""

from typing import Literal, TypeAlias

import torch

from rlprims.corrections._spans import Level, spans
from rlprims.corrections._weights import Weights
from rlprims.masking import check_tokens
from rlprims.ratios import log_ratio, sequence_log_ratio
from rlprims.types import CuSeqlens, PerToken, TokenMask, TurnIds

Mean: TypeAlias = Literal["product", "geometric"]
Action: TypeAlias = Literal["truncate", "mask"]


def importance_weights(
    old_log_probs: PerToken,
    rollout_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    turn_ids: TurnIds | None = None,
    *,
    level: Level = "token",
    mean: Mean = "product",
    action: Action = "truncate",
    low: float = 0.0,
    high: float = 2.0,
) -> Weights:
    """Weights for the gap between trainer and sampler: w = π_old / π_rollout, the trainer's over the sampler's.

    Multiply them into a per-token loss before it is aggregated::

        loss = token_mean(clipped_surrogate(...) * importance_weights(...).values, response_mask)

    They correct a loss whose ratio is to ``old_log_probs``. One that is anchored at ``rollout_log_probs`` already
    (``losses.dppo``, ``topr``, ``vespo``, ``decoupled_ppo``) would be corrected twice.

    ``level`` and ``mean`` say which ratio: each token's own; or one for the turn or the response, the product of its
    tokens' (an unbiased weight, exponential in length: 1000 tokens off by 0.002 nats make 7.4), or their geometric mean
    (1.002). ``action`` says what the bounds do: truncate w to [low, high], or set w to 0 outside and leave it inside.
    That a bad token drops its whole response, a veto, has bounds of its own: ``importance_weights(...) * veto(...)``.

    The defaults are truncated importance sampling (Yao et al. 2025, fengyao.notion.site/off-policy-rl) with the cap of
    verl, slime and open-instruct; TRL's is 3, NeMo-RL's 5. TRL's ``sequence_*`` modes are products, ms-swift's are
    geometric means. A NaN from the sampler propagates; TRL makes it a weight of 1.

    Args:
        old_log_probs: float (B, T) or (N,): the trainer's log-probs of the policy that sampled.
        rollout_log_probs: float, like old_log_probs: the sampler's own.
        response_mask: bool, like old_log_probs.
        cu_seqlens: int (B+1,) if packed.
        turn_ids: int, like old_log_probs: which turn of the response a valid token belongs to; read by "segment". None:
            the response is one turn.
        level: "token", "segment" (a turn) or "sequence".
        mean: "product" or "geometric"; how the ratios of a segment or sequence become one.
        action: "truncate" or "mask".
        low, high: bounds of the weight, 0 <= low <= 1 <= high; low = 0 bounds it from above only.

    Returns:
        Weights that account for "rollout->old": like old_log_probs, never attached to a graph; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; an unknown option; "geometric" for single tokens; bounds that do
            not enclose 1.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> trainer, sampler = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-2.0, -1.0]])
    >>> importance_weights(trainer, sampler, m).values
    tensor([[2., 1.]])
    >>> importance_weights(trainer, sampler, m, level="sequence", mean="geometric").values
    tensor([[1.6487, 1.6487]])
    """
    check_tokens(response_mask, cu_seqlens, old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"low={low} must be in [0, 1] and high={high} at least 1, the weight where both agree")
    if mean not in ("product", "geometric"):
        raise ValueError(f"unknown mean {mean!r}: choose 'product' or 'geometric'")
    trainer, sampler = old_log_probs.detach(), rollout_log_probs
    over = spans(level, response_mask, cu_seqlens, turn_ids)
    if over is not None:
        pair = over.lay(trainer), over.lay(sampler)
        log_w = sequence_log_ratio(*pair, *over, mean=mean == "geometric").reshape(response_mask.shape)
    elif mean == "product":
        log_w = log_ratio(trainer, sampler, response_mask)
    else:
        raise ValueError(f"mean={mean!r} needs level='segment' or 'sequence': a token's ratio is not averaged")
    weights = log_w.exp()
    if action == "truncate":
        bounded = weights.clamp(low, high)
    elif action == "mask":
        bounded = torch.where((weights < low) | (weights > high), 0.0, weights)
    else:
        raise ValueError(f"unknown action {action!r}: choose 'truncate' or 'mask'")
    return Weights(torch.where(response_mask, bounded, 0.0), frozenset({"rollout->old"}))
