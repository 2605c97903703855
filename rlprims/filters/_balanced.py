"""Selection of tokens by PPO's clip, with bounds that are chosen for the whole update."""

import math
from typing import Literal, TypeAlias

import torch

from rlprims._described import described
from rlprims.masking import check_choice, check_range, check_tokens, zero_outside
from rlprims.ratios import log_ratio
from rlprims.types import AllReduce, CuSeqlens, PerToken, TokenMask

FirstBound: TypeAlias = Literal["high", "low"]


@described
def bapo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    target: float = 0.5,
    low_start: float = 0.6,
    low_end: float = 0.9,
    high_start: float = 1.2,
    high_end: float = 3.0,
    high_step: float = 0.1,
    first: FirstBound = "high",
    all_reduce: AllReduce | None = None,
) -> TokenMask:
    """PPO's clip with bounds chosen per update: BAPO, Xi et al. 2025 (arXiv:2510.18927), algorithm 1.

    It drops the tokens that PPO would clip: ratio > c_high if A > 0, ratio < c_low if A < 0. From
    (``low_start``, ``high_start``) the bound ``first`` is raised to its end, then the other, until the tokens with
    A > 0 have a large enough share of the objective, P >= ``target`` (P + N), with P = Σ_{A>0} min(ratio, c_high) A and
    N = Σ_{A<0} max(ratio, c_low) |A|. Disable the clip of the loss:
    ``losses.clipped_surrogate(clip_low=1.0, clip_high=inf)``. Its gradient is then PPO's within (c_low, c_high).

    A clipped token still counts in P and N, with its bound, as in the authors' code. So a higher c_low makes N larger
    and never helps to reach the target: the chosen c_low is its start or its end.

    Where sources disagree: the paper raises c_high first, the authors' code (WooooDyy/BAPO) c_low. That code tests
    P / N >= its ``adv_ratio_target``, which is target / (1 − target): its default of 1 is 0.5 here. Its README has the
    target, starts and ends that are the defaults here; its configuration ends at 0.8 and 2. It also has a dual clip at
    3. The sums are over the whole update: call this once before the batch is split, or give ``all_reduce``. The
    authors' code adds the sums of one micro-batch of each rank.

    Args:
        log_probs: the policy before the update; it gets no gradient here.
        target: the smallest share of P in P + N, in [0, 1].
        low_start, low_end: the range of c_low, a ratio; 0 <= low_start <= low_end.
        high_start, high_end, high_step: the range of c_high, 0 <= high_start <= high_end, and its step, above 0.

    >>> m = torch.ones(1, 3, dtype=torch.bool)
    >>> ratio, advantages = torch.tensor([[1.45, 0.7, 1.0]]), torch.tensor([[1.0, -1.0, -1.0]])
    >>> bapo(ratio.log(), torch.zeros(1, 3), advantages, m, target=0.45).tolist()  # c_high 1.4: 1.4 of 1.4 + 1.7
    [[False, True, True]]
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_choice("first", first, FirstBound)
    check_range(0, 1, ": a share; the authors' ratio r is r / (1 + r) here", target=target)
    if not (0 <= low_start <= low_end < math.inf and 0 <= high_start <= high_end < math.inf and high_step > 0):
        raise ValueError(
            f"low_start={low_start}, low_end={low_end}, high_start={high_start}, high_end={high_end} and "
            f"high_step={high_step}, expected 0 <= start <= end of both, and a step above 0"
        )
    lows, steps = [low_start, low_end], math.ceil((high_end - high_start) / high_step - 1e-9)
    highs = [*(high_start + k * high_step for k in range(steps)), high_end]

    a = zero_outside(advantages, response_mask).detach()
    ratio = log_ratio(log_probs.detach(), old_log_probs, response_mask).exp()
    positive = torch.stack([(a.clamp(min=0) * ratio.clamp(max=high)).sum() for high in highs])
    negative = torch.stack([(-a.clamp(max=0) * ratio.clamp(min=low)).sum() for low in lows])
    if all_reduce is not None:
        positive, negative = all_reduce(positive), all_reduce(negative)
    if first == "high":  # the pairs of bounds in the order in which they are tried
        pairs = [*((0, j) for j in range(len(highs))), (1, len(highs) - 1)]
    else:
        pairs = [(0, 0), *((1, j) for j in range(len(highs)))]
    i, j = torch.tensor(pairs, device=ratio.device).unbind(1)
    reaches_target = positive[j] >= target * (positive[j] + negative[i])
    earlier_pair_does = reaches_target.long().cumsum(0) - reaches_target.long() > 0
    chosen = (~earlier_pair_does).long().sum().reshape(1) - 1  # the first pair that reaches the target, or the last
    c_low = ratio.new_tensor(lows).gather(0, i.gather(0, chosen))
    c_high = ratio.new_tensor(highs).gather(0, j.gather(0, chosen))
    clipped = torch.where(a > 0, ratio > c_high, (a < 0) & (ratio < c_low))
    return response_mask & ~clipped
