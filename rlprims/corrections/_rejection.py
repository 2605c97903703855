"""See :func:`rejection`."""

import math
from typing import Literal, TypeAlias

from rlprims.corrections._spans import Level, spans
from rlprims.corrections._weights import Weights
from rlprims.layout import lengths_of_tokens, sequence_sum, to_tokens
from rlprims.masking import check_tokens, zero_outside
from rlprims.ratios import estimate_kl
from rlprims.types import CuSeqlens, PerToken, TokenMask, TurnIds

Estimator: TypeAlias = Literal["k1", "k2", "k3"]
Statistic: TypeAlias = Literal["mean", "sum", "max"]


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
) -> Weights:
    """Keep tokens, turns or responses on which trainer and sampler agree; verl's rejection sampling, all its options.

    Per token, with x = old_log_probs − rollout_log_probs, the trainer's over the sampler's:

    - k1: x, which is signed. Its bounds are of the ratio: kept if low <= exp(x) <= high. The mean over a response is
      the geometric mean of its ratios, the sum their product.
    - k2: x²/2, and k3: exp(x) − 1 − x, estimates of KL(sampler ‖ trainer) in nats, 0 or more: kept if <= high.

    ``statistic`` makes one number of a segment or sequence; "max" asks it of every token. Of a single token all three
    are its own. The default is verl's ``seq_mean_k3`` at 0.01.

    verl's k1 is −x, so its "0.5_5.0" keeps ratios from 0.2 to 2; here ``low=0.5, high=5.0`` keeps 0.5 to 5. To have
    verl's, give the reciprocals, exchanged. Two criteria are two gates, multiplied. A NaN is not agreement: rejected.

    Args:
        old_log_probs: float (B, T) or (N,): the trainer's log-probs of the policy that sampled.
        rollout_log_probs: float, like old_log_probs: the sampler's own.
        response_mask: bool, like old_log_probs.
        cu_seqlens: int (B+1,) if packed.
        turn_ids: int, like old_log_probs: which turn a valid token belongs to; read by "segment". None: one turn.
        estimator: "k1", "k2" or "k3".
        level: "token", "segment" (a turn) or "sequence": what is kept or rejected as one.
        statistic: "mean", "sum" or "max" over the tokens of a segment or sequence.
        low: for k1 only: the smallest ratio, in [0, 1]; None: no bound from below.
        high: the largest ratio of k1, at least 1; the largest divergence of k2 and k3, at least 0.

    Returns:
        Weights of 1 where kept and 0 elsewhere, which account for no gap.

    Raises:
        ValueError: shapes or dtypes that do not fit; an unknown option; bounds that reject policies that agree.

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
    if estimator not in ("k1", "k2", "k3"):
        raise ValueError(f"unknown estimator {estimator!r}: choose 'k1', 'k2' or 'k3'")
    if statistic not in ("mean", "sum", "max"):
        raise ValueError(f"unknown statistic {statistic!r}: choose 'mean', 'sum' or 'max'")
    smallest, largest = _bounds(estimator, low, high)
    x = zero_outside(old_log_probs.detach(), response_mask) - zero_outside(rollout_log_probs, response_mask)
    if estimator != "k1":
        x = estimate_kl(-x, estimator)
    over = spans(level, response_mask, cu_seqlens, turn_ids)
    if over is not None and statistic != "max":
        x = to_tokens(sequence_sum(over.lay(x), *over), *over)
        x = (x / lengths_of_tokens(*over) if statistic == "mean" else x).reshape(response_mask.shape)
    rejected = ~((x >= smallest) & (x <= largest))
    if over is not None and statistic == "max":
        rejected = (to_tokens(sequence_sum(over.lay(rejected), *over), *over) > 0).reshape(response_mask.shape)
    return Weights((response_mask & ~rejected).to(x.dtype))


def _bounds(estimator: Estimator, low: float | None, high: float) -> tuple[float, float]:
    """Those of the estimator itself."""
    if estimator != "k1":
        if low is not None or high < 0:
            raise ValueError(f"low={low} and high={high}: {estimator} needs no low and a high of at least 0, in nats")
        return -math.inf, high
    if not 0 <= (low or 0) <= 1 <= high:
        raise ValueError(f"low={low} must be in [0, 1] and high={high} at least 1, the ratio where both agree")
    return math.log(low) if low else -math.inf, math.log(high)
