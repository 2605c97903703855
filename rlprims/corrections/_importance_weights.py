"""Weights for the gap between trainer and sampler, and their normalization over the batch."""

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.corrections._weights import Level, Weights, check_level, segments
from rlprims.layout import sequence_lengths, sequence_sum
from rlprims.masking import check_choice, check_tokens, upcast, zero_outside
from rlprims.ratios import log_ratio, sequence_log_ratio
from rlprims.types import AllReduce, CuSeqlens, PerToken, TokenMask, TurnIds

Mean: TypeAlias = Literal["product", "geometric"]
Action: TypeAlias = Literal["truncate", "mask"]
Per: TypeAlias = Literal["token", "sequence"]


@described
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
    all_reduce_rows: AllReduce | None = None,
) -> Weights:
    """Weights for the gap between trainer and sampler: w = π_old / π_rollout, the trainer's over the sampler's.

    Multiply them into a per-token loss before it is aggregated::

        loss = token_mean(clipped_surrogate(...) * importance_weights(...).values, response_mask)

    They correct a loss whose ratio is to ``old_log_probs``. Do not use them with a loss whose ratio is to
    ``rollout_log_probs`` (``losses.dppo``, ``topr``, ``vespo``, ``decoupled_ppo``): the gap would be corrected twice.

    ``level`` and ``mean`` select the ratio: that of each token, or one ratio for the turn or the response. This is the
    product of the tokens' ratios (an unbiased weight, but exponential in length: 1000 tokens with a gap of 0.002 nats
    each give 7.4) or their geometric mean (1.002). ``action`` selects what happens outside [low, high]: w is truncated
    to the bounds, or set to 0. To drop a whole response because of one token, multiply by a gate, which has its own
    bounds: ``importance_weights(...) * veto(...)``.

    The defaults are truncated importance sampling (Yao et al. 2025, fengyao.notion.site/off-policy-rl) with the cap of
    verl, slime and open-instruct; TRL's is 3, NeMo-RL's 5. TRL's ``sequence_*`` modes are products, ms-swift's are
    geometric means. A NaN from the sampler propagates; TRL replaces it by a weight of 1.

    Args:
        old_log_probs: the trainer's log-probs of the policy that sampled.
        turn_ids: the turn of the response that a valid token belongs to, for "segment". None: the response is one turn.
        level: "token", "segment" (a turn of a sequence that is whole) or "sequence".
        mean: the "product" or the "geometric" mean of the ratios of a segment or sequence.
        action: "truncate" or "mask".
        low, high: bounds of the weight, 0 <= low <= 1 <= high; low = 0 is no lower bound.

    Returns:
        Weights with ``corrected={"rollout->old"}``: like old_log_probs, without a gradient, 0 outside the mask.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> trainer, sampler = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-2.0, -1.0]])
    >>> importance_weights(trainer, sampler, m).values
    tensor([[2., 1.]])
    >>> importance_weights(trainer, sampler, m, level="sequence", mean="geometric").values
    tensor([[1.6487, 1.6487]])
    """
    check_tokens(response_mask, cu_seqlens, old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    check_level(level, response_mask, cu_seqlens, turn_ids, all_reduce_rows)
    check_choice("mean", mean, Mean)
    check_choice("action", action, Action)
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"low={low} and high={high}, expected 0 <= low <= 1 <= high: 1 is the weight if both agree")
    if level == "token" and mean == "geometric":
        raise ValueError(f"mean={mean!r}, expected level='segment' or 'sequence': a token's ratio is not averaged")
    if level == "token":
        log_weights = log_ratio(old_log_probs.detach(), rollout_log_probs, response_mask)
    else:
        segment_mask, boundaries = segments(level, response_mask, cu_seqlens, turn_ids)
        trainer = old_log_probs.detach().reshape(segment_mask.shape)
        sampler = rollout_log_probs.reshape(segment_mask.shape)
        data = trainer, sampler, segment_mask, boundaries
        log_weights = sequence_log_ratio(*data, mean=mean == "geometric", all_reduce_rows=all_reduce_rows)
    weights = log_weights.reshape(response_mask.shape).exp()
    if action == "truncate":
        bounded = weights.clamp(low, high)
    else:
        bounded = torch.where((weights < low) | (weights > high), 0.0, weights)
    return Weights(torch.where(response_mask, bounded, 0.0), frozenset({"rollout->old"}))


@described
def batch_normalized(
    weights: Weights,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    per: Per = "token",
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> Weights:
    """Weights divided by their mean, so that a correction does not change the size of the step: w / mean(w).

    The mean is over all valid tokens (for weights of tokens), or over the mean weights of the responses that have a
    valid token (for weights of responses). Rejected tokens count, with weight 0. The mean is that of the whole step:
    call this once, before the batch is split. In verl it is ``rollout_is_batch_normalize``; ROLL and slime take the
    mean of a micro-batch.

    Args:
        weights: the result of :func:`importance_weights` or a similar function, or a product of such results.
        response_mask: like weights.values.
        per: "token" or "sequence": whether the mean is over tokens or over responses.

    Returns:
        Weights with mean 1 and the same ``corrected``; all 0 if all were 0.

    >>> batch_normalized(Weights(torch.tensor([[2.0, 1.0]])), torch.ones(1, 2, dtype=torch.bool)).values
    tensor([[1.3333, 0.6667]])
    """
    check_tokens(response_mask, cu_seqlens, importance_weights=weights.values)
    check_choice("per", per, Per)
    values = zero_outside(weights.values, response_mask)
    lengths = sequence_lengths(response_mask, cu_seqlens)
    sums = sequence_sum(values, response_mask, cu_seqlens)
    if per == "token":
        total, count = sums.sum(), lengths.sum()
    else:
        total, count = (sums / lengths.clamp(min=1)).sum(), (lengths > 0).sum()
    if all_reduce is not None:
        total, count = all_reduce(torch.stack([total, count.to(total.dtype)]))
    mean = torch.where(total == 0, 1.0, total / count.clamp(min=1))
    return Weights(values / mean, weights.corrected)


@described
def replace_nonfinite(
    rollout_log_probs: PerToken, old_log_probs: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None
) -> PerToken:
    """Replace log-probs of the sampler that are NaN or infinite by the trainer's: their weight is 1, as in TRL.

    To drop such tokens instead, use ``filters.finite_tokens``.

    Args:
        old_log_probs: the trainer's log-probs of the policy that sampled.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> replace_nonfinite(torch.tensor([[-1.0, torch.nan]]), torch.tensor([[-1.1, -2.0]]), m)
    tensor([[-1., -2.]])
    """
    check_tokens(response_mask, cu_seqlens, rollout_log_probs=rollout_log_probs, old_log_probs=old_log_probs)
    known = rollout_log_probs.isfinite()
    log_probs = torch.where(known, upcast(rollout_log_probs), upcast(old_log_probs))
    return zero_outside(log_probs, response_mask).detach()
