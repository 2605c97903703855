"""Factors for a per-token loss: weights for the gap between trainer and sampler, their normalization, and FIPO's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlprims import scan
from rlprims._described import described
from rlprims.layout import sequence_lengths, sequence_sum, turn_boundaries
from rlprims.masking import check_above, check_choice, check_tokens, upcast, zero_outside
from rlprims.ratios import clamp_log_ratio, log_ratio, sequence_log_ratio
from rlprims.types import AllReduce, CuSeqlens, PerToken, TokenMask, TurnIds

Level: TypeAlias = Literal["token", "segment", "sequence"]


@dataclass(frozen=True, eq=False)
class Weights:
    """One factor per token for a loss, and the gaps between two policies that it corrects.

    Multiply the losses before the aggregation: ``losses * weights.values``. The product of two corrects the gaps of
    both; two that correct the same gap cannot be multiplied. A gate selects tokens by factors of 0 or 1. A rejected
    token still counts in the denominators of the aggregations, as in every peer. To leave it out there too, use the
    mask ``response_mask & (weights.values > 0)`` instead, and count ``totals`` from it.

    Args:
        values: float (B, T) or (N,), without a gradient, 0 outside the mask.
        corrected: the gaps (none for a gate): "from->to", the policy that sampled and that whose gradient is estimated.

    >>> import torch
    >>> weights = Weights(torch.tensor([[2.0, 0.5]]), frozenset({"rollout->old"}))
    >>> gate = Weights(torch.tensor([[1.0, 0.0]]))
    >>> (weights * gate).values
    tensor([[2., 0.]])
    >>> weights * gate * weights
    Traceback (most recent call last):
    ...
    ValueError: correcting twice: both factors account for rollout->old; keep one of them
    """

    values: PerToken
    corrected: frozenset[str] = frozenset()

    def __mul__(self, other: "Weights") -> "Weights":
        if not isinstance(other, Weights):
            raise TypeError(f"Weights times {type(other).__name__}: multiply the losses by weights.values")
        both = self.corrected & other.corrected
        if both:
            raise ValueError(f"correcting twice: both factors account for {', '.join(sorted(both))}; keep one of them")
        return Weights(self.values * other.values, self.corrected | other.corrected)

    __rmul__ = __mul__


def check_level(
    level: Level,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None,
    turn_ids: TurnIds | None,
    all_reduce_rows: AllReduce | None,
) -> None:
    """Raise ``ValueError`` for an unknown level, segments of split sequences, or ``turn_ids`` unlike the mask."""
    check_choice("level", level, Level)
    if level == "segment" and all_reduce_rows is not None:
        raise ValueError(
            "level='segment' with all_reduce_rows, expected 'token' or 'sequence' if sequences are split over ranks: "
            "sums of turns are not exchanged; gather the log-probs first"
        )
    if turn_ids is not None:
        check_tokens(response_mask, cu_seqlens, turn_ids=turn_ids)


def segments(
    level: Level, response_mask: TokenMask, cu_seqlens: CuSeqlens | None, turn_ids: TurnIds | None
) -> tuple[TokenMask, CuSeqlens | None]:
    """The mask, flattened if it is padded, and a ``cu_seqlens`` that makes each turn or response a sequence."""
    if level == "sequence" or turn_ids is None:
        return response_mask, cu_seqlens
    return response_mask.flatten(), turn_boundaries(turn_ids, response_mask, cu_seqlens)


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

    They correct a loss whose ratio is to ``old_log_probs``: ``corrected={"rollout->old"}``. A loss whose ratio is to
    ``rollout_log_probs`` (``losses.dppo``, ``topr``, ``vespo``, ``decoupled_ppo``) would be corrected twice.

    ``level`` and ``mean`` select the ratio: that of each token, or one ratio for the turn or the response. This is the
    "product" of the tokens' ratios (an unbiased weight, but exponential in length: 1000 tokens with a gap of 0.002 nats
    each give 7.4) or their "geometric" mean (1.002). ``action`` selects what happens outside [low, high]: "truncate" w
    to the bounds, or "mask" it by 0. To drop a whole response because of one token, multiply by a gate.

    The defaults are truncated importance sampling (Yao et al. 2025, fengyao.notion.site/off-policy-rl) with the cap of
    verl, slime and open-instruct; TRL's is 3, NeMo-RL's 5. TRL's ``sequence_*`` modes are products, ms-swift's are
    geometric means. A NaN from the sampler propagates; TRL replaces it by a weight of 1.

    Args:
        turn_ids: the turn that a valid token belongs to, for "segment". None: one turn.
        level: "token", "segment" (a turn of a sequence that is whole) or "sequence".
        low, high: bounds of the weight, 0 <= low <= 1 <= high; low = 0 is no lower bound.

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

    By ``per`` the mean is over all valid tokens (for weights of tokens), or over the mean weights of the responses with
    a valid token (for weights of responses), of the whole step: call this once, before the batch is split. Rejected
    tokens count, with weight 0. In verl it is ``rollout_is_batch_normalize``; ROLL and slime use a micro-batch's mean.

    Args:
        weights: the result of :func:`importance_weights` or a similar function, or a product of such results.

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

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> replace_nonfinite(torch.tensor([[-1.0, torch.nan]]), torch.tensor([[-1.1, -2.0]]), m)
    tensor([[-1., -2.]])
    """
    check_tokens(response_mask, cu_seqlens, rollout_log_probs=rollout_log_probs, old_log_probs=old_log_probs)
    known = rollout_log_probs.isfinite()
    log_probs = torch.where(known, upcast(rollout_log_probs), upcast(old_log_probs))
    return zero_outside(log_probs, response_mask).detach()


@described
def fipo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    half_life: float = 32.0,
    w_min: float = 1.0,
    w_max: float = 1.2,
    max_ratio: float = 10.0,
    safe_ratio: float = 4.0,
) -> Weights:
    """Future-KL influence, Ma et al. 2026 (arXiv:2603.19835): larger weights before reinforced tokens.

    With d_t = log π_t − log π_old,t and ρ = exp(d), F_t = Σ_{k≥t} γ^{k−t} d_k over the valid tokens of the response
    with ρ_k <= ``max_ratio``, γ = 2^(−1/τ), and f_t = clip(exp(F_t), w_min, w_max). If A_t < 0 and ρ_t >
    ``safe_ratio``, f_t is at most 1, so that bad tokens whose probability has grown a lot get no larger weight. The
    weights multiply the policy loss, f_t · loss_t. At the first update of a batch every weight is 1.

    k − t counts valid tokens, so tool output between two turns is not counted. ms-swift counts columns. ``w_min=1`` and
    ``max_ratio=10`` are from the authors' script for 32B; ``w_min=0.8`` is the symmetric form. Both ratios are above 0.

    Args:
        log_probs: of the policy before this update; it gets no gradient here.
        half_life: τ, in valid tokens: the weight of d_k halves every τ tokens; above 0.
        w_min, w_max: bounds of a weight; 0 <= w_min <= 1 <= w_max.

    >>> m, old = torch.tensor([[True, False, True]]), torch.zeros(1, 3)
    >>> log_probs = torch.tensor([[0.0, 9.0, 0.2]])  # F is 0.1 and 0.2, because the tool's token is not counted
    >>> fipo(log_probs, old, torch.ones(1, 3), m, half_life=1.0).values
    tensor([[1.1052, 0.0000, 1.2000]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    if not 0 <= w_min <= 1 <= w_max:
        raise ValueError(f"w_min={w_min} and w_max={w_max}, expected 0 <= w_min <= 1 <= w_max: on policy w is 1")
    check_above(0, inf=True, half_life=half_life, max_ratio=max_ratio, safe_ratio=safe_ratio)
    d = log_ratio(log_probs.detach(), old_log_probs, response_mask)
    ratio = d.exp()
    counted = d.masked_fill(ratio > max_ratio, 0.0)
    future = scan.discounted_sum(counted, 2 ** (-1 / half_life), response_mask, cu_seqlens)
    weights = clamp_log_ratio(future).exp().clamp(w_min, w_max)
    unsafe = (zero_outside(advantages, response_mask) < 0) & (ratio > safe_ratio)
    return Weights(zero_outside(weights.clamp(max=1.0).where(unsafe, weights), response_mask))
