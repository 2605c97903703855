"""Gates: weights of 0 or 1 that drop tokens, turns or responses."""

import math
from typing import Literal, TypeAlias

from rlprims._described import described
from rlprims.corrections._weights import Level, Weights, check_level, segments
from rlprims.layout import expand_to_tokens, sequence_lengths, sequence_sum
from rlprims.masking import check_at_least, check_choice, check_tokens, zero_outside
from rlprims.ratios import estimate_kl
from rlprims.types import AllReduce, CuSeqlens, PerToken, TokenMask, TurnIds

Estimator: TypeAlias = Literal["k1", "k2", "k3"]
Statistic: TypeAlias = Literal["mean", "sum", "max"]


@described
def rejection(
    old_log_probs: PerToken,
    rollout_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    turn_ids: TurnIds | None = None,
    *,
    estimator: Estimator = "k3",
    level: Level = "sequence",
    statistic: Statistic = "mean",
    low: float | None = None,
    high: float = 0.01,
    all_reduce_rows: AllReduce | None = None,
) -> Weights:
    """Keep tokens, turns or responses on which trainer and sampler agree: verl's rejection sampling with all options.

    Per token, with x = old_log_probs − rollout_log_probs, the trainer's over the sampler's, the ``estimator`` is:

    - k1: x, which is signed. The bounds are for the ratio: a token is kept if low <= exp(x) <= high. The mean over a
      response is the geometric mean of its ratios, the sum is their product.
    - k2: x²/2, and k3: exp(x) − 1 − x, estimates of KL(sampler ‖ trainer) in nats, 0 or more: kept if <= high.

    ``statistic`` reduces a segment or sequence to one number, its "mean" or "sum"; with "max" every token must be
    within the bounds. The default is verl's ``seq_mean_k3`` at 0.01.

    verl's k1 is −x, so its "0.5_5.0" keeps ratios from 0.2 to 2; here ``low=0.5, high=5.0`` keeps 0.5 to 5. For
    verl's range pass ``low=1/5.0, high=1/0.5``. For two criteria multiply two gates. A NaN is rejected.

    Args:
        turn_ids: the turn that a valid token belongs to, for "segment". None: one turn.
        level: the unit that is kept or rejected: "token", "segment" (a turn of a sequence that is whole) or "sequence".
        low: for k1 only: the smallest ratio, in [0, 1]; None: no bound from below.
        high: the largest ratio of k1, at least 1; the largest divergence of k2 and k3, at least 0.

    >>> import torch
    >>> m = torch.ones(2, 2, dtype=torch.bool)
    >>> trainer, sampler = torch.tensor([[0.5, 0.2], [0.5, 0.1]]).log(), torch.tensor([[0.5, 0.2], [0.1, 0.5]]).log()
    >>> rejection(trainer, sampler, m).values
    tensor([[1., 1.],
            [0., 0.]])
    >>> rejection(trainer, sampler, m, estimator="k1", level="token", low=0.5, high=5.1).values
    tensor([[1., 1.],
            [1., 0.]])
    """
    check_tokens(response_mask, cu_seqlens, old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    check_level(level, response_mask, cu_seqlens, turn_ids, all_reduce_rows)
    check_choice("estimator", estimator, Estimator)
    check_choice("statistic", statistic, Statistic)
    smallest, largest = _bounds(estimator, low, high)
    x = zero_outside(old_log_probs.detach(), response_mask) - zero_outside(rollout_log_probs, response_mask)
    if estimator != "k1":
        x = estimate_kl(-x, estimator)
    if level == "token":
        keep = (smallest <= x) & (x <= largest)
    else:
        segment_mask, boundaries = segments(level, response_mask, cu_seqlens, turn_ids)
        x = x.reshape(segment_mask.shape)
        if statistic == "max":  # no token of the segment is outside the bounds
            outside = ~((smallest <= x) & (x <= largest))
            keep = sequence_sum(outside, segment_mask, boundaries, all_reduce_rows=all_reduce_rows) == 0
        else:
            total = sequence_sum(x, segment_mask, boundaries, all_reduce_rows=all_reduce_rows)
            if statistic == "mean":
                lengths = sequence_lengths(segment_mask, boundaries, all_reduce_rows=all_reduce_rows)
                total = total / lengths.clamp(min=1)
            keep = (smallest <= total) & (total <= largest)
        keep = expand_to_tokens(keep, segment_mask, boundaries).reshape(response_mask.shape)
    return Weights((response_mask & keep).to(x.dtype))


@described
def opsm(
    log_probs: PerToken,
    rollout_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    delta: float,
    all_reduce_rows: AllReduce | None = None,
) -> Weights:
    """Off-policy sequence masking, DeepSeek-V3.2 (arXiv:2512.02556): drop bad responses that are far off policy.

    A token with A < 0 is dropped if the mean of rollout_log_probs − log_probs over its response is above ``delta``, in
    nats and at least 0. As in the paper, staleness and the sampler's numerics both count; to measure staleness only,
    pass ``old_log_probs`` as ``rollout_log_probs``. TRL's example is 0.5, slime's 1e-4.

    Args:
        log_probs: current policy; it gets no gradient here.

    >>> import torch
    >>> current, sampler, advantages = torch.tensor([[-2.0, -1.0], [-1.0, -1.0], [1.0, -1.0]])[:, :, None]
    >>> opsm(current, sampler, -advantages, torch.ones(2, 1, dtype=torch.bool), delta=0.5).values.T
    tensor([[0., 1.]])
    """
    check_tokens(
        response_mask, cu_seqlens, log_probs=log_probs, rollout_log_probs=rollout_log_probs, advantages=advantages
    )
    check_at_least(0, ", in nats", inf=True, delta=delta)
    difference = zero_outside(rollout_log_probs, response_mask) - zero_outside(log_probs, response_mask)
    total = sequence_sum(difference.detach(), response_mask, cu_seqlens, all_reduce_rows=all_reduce_rows)
    mean = total / sequence_lengths(response_mask, cu_seqlens, all_reduce_rows=all_reduce_rows).clamp(min=1)
    is_on_policy = expand_to_tokens(mean <= delta, response_mask, cu_seqlens)
    keep = is_on_policy | (advantages >= 0)
    return Weights((response_mask & keep).to(difference.dtype))


def _bounds(estimator: Estimator, low: float | None, high: float) -> tuple[float, float]:
    """The bounds on the log-ratio (k1) or on the divergence in nats (k2, k3)."""
    if estimator != "k1":
        if low is not None:
            raise ValueError(f"low={low}, expected None for {estimator}")
        check_at_least(0, ", in nats", inf=True, high=high)
        return -math.inf, high
    if not 0 <= (low or 0) <= 1 <= high:
        raise ValueError(f"low={low} and high={high}, expected 0 <= low <= 1 <= high: 1 is the ratio if both agree")
    return math.log(low) if low else -math.inf, math.log(high)
