"""Selection of tokens: one bool per token, from statistics of all valid tokens of the step.

``cu_seqlens`` is only checked: the statistics are over tokens and do not depend on the sequences. With ``all_reduce``
they are over the tokens of all ranks. To find a threshold the ranks exchange counts, not tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlprims.masking import check_tokens, zero_outside
from rlprims.types import AllReduce, CuSeqlens, PerToken, TokenMask


def clip_cov(
    log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    fraction: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    generator: torch.Generator | None = None,
    all_reduce: AllReduce | None = None,
    tokens_before: Tensor | int = 0,
) -> TokenMask:
    """Drop a few random tokens of high covariance: Clip-Cov, Cui et al. 2025 (arXiv:2505.22617).

    Of the tokens with low < (log π − mean log π)(A − mean A) < high, ⌊fraction · valid tokens⌋ are drawn, at least one,
    or all of them if they are fewer. They get no gradient: ``losses * clip_cov(...)``. :func:`kl_cov` has the reason.

    The means and the number of tokens are those of the whole step: call this once before the batch is split, or give
    ``all_reduce``. verl and SkyRL compute them per micro-batch, draw at least one token in each, and use the global
    generator; they do not draw a token that PPO clips already. Before the first update PPO clips no token.

    The draw is a hash of one number from the generator and the token's place among the valid ones. It is the same for
    padded and packed tokens and on every device.

    Args:
        log_probs: float (B, T) or (N,), the policy before the update; it gets no gradient here.
        advantages: float, like log_probs.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed; not used.
        fraction: the share of all tokens to drop, above 0 and at most 1.
        low, high: the band of covariance to draw from, in units of the advantage.
        generator: the source of the random number; on any device, and in the same state on all ranks.
        all_reduce: sums a tensor over the ranks, if the step is split over ranks; None: it is whole.
        tokens_before: with all_reduce: the number of valid tokens on the ranks before this one, so that a token's place
            is counted over the whole step.

    Returns:
        bool, like log_probs: True on kept tokens; False on drawn tokens and outside the mask.

    Raises:
        ValueError: wrong shapes or dtypes; a fraction outside (0, 1]; low >= high; no generator.

    >>> m = torch.ones(1, 4, dtype=torch.bool)
    >>> log_probs, advantages = torch.tensor([[-0.1, -3.0, -0.1, -3.0], [2.0, 1.0, -1.0, -1.0]])[:, None]
    >>> clip_cov(log_probs, advantages, m, generator=torch.Generator().manual_seed(0)).tolist()
    [[True, True, True, False]]
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, advantages=advantages)
    _check_fraction(fraction)
    if low >= high:
        raise ValueError(f"low={low} and high={high}, expected low < high: the band would be empty")
    if generator is None:
        raise ValueError("generator is None, expected a torch.Generator, so that the draw can be repeated")
    covariance = _covariance(log_probs, advantages, response_mask, all_reduce)
    in_band = response_mask & (low < covariance) & (covariance < high)
    seed = torch.randint(2**62, (1,), generator=generator, device=generator.device).to(response_mask.device)
    count = _share(fraction, _over_ranks(all_reduce, response_mask.sum())).clamp(min=1)
    drawn = _largest(_noise(seed, response_mask, tokens_before), in_band, count, all_reduce)
    return response_mask & ~drawn


def kl_cov(
    log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    fraction: float = 2e-4,
    all_reduce: AllReduce | None = None,
) -> TokenMask:
    """Select the tokens that KL-Cov penalizes, Cui et al. 2025 (arXiv:2505.22617): those of the largest covariance.

    The covariance of a token is (log π − mean log π)(A − mean A). It is large for a likely token with a high advantage
    and for an unlikely token with a low one: the updates that lower the entropy. Add a KL penalty on these tokens
    only::

        selected = kl_cov(log_probs, advantages, response_mask)
        penalties = kl_coef * kl(log_probs, old_log_probs, response_mask, value="abs")
        losses = losses + torch.where(selected, penalties, 0.0)

    The means and the order are those of the whole step: call this once before the batch is split, or give
    ``all_reduce``. verl and SkyRL compute them per micro-batch and select at least one token in each.

    Args:
        log_probs: float (B, T) or (N,), the policy before the update; it gets no gradient here.
        advantages: float, like log_probs.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed; not used.
        fraction: the share of the tokens to select, above 0 and at most 1; the paper has 2e-3 (7B) and 2e-4 (32B).
        all_reduce: sums a tensor over the ranks, if the step is split over ranks; None: it is whole.

    Returns:
        bool, like log_probs: True on selected tokens, at least one if any token is valid, and on all that tie with the
        last one; False outside the mask.

    Raises:
        ValueError: wrong shapes or dtypes; a fraction outside (0, 1].

    >>> m = torch.ones(1, 4, dtype=torch.bool)
    >>> kl_cov(torch.tensor([[-0.1, -3.0, -0.1, -3.0]]), torch.tensor([[2.0, 1.0, -1.0, -1.0]]), m).tolist()
    [[True, False, False, False]]
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, advantages=advantages)
    _check_fraction(fraction)
    covariance = _covariance(log_probs, advantages, response_mask, all_reduce)
    count = _share(fraction, _over_ranks(all_reduce, response_mask.sum())).clamp(min=1)
    return _largest(covariance, response_mask, count, all_reduce)


def high_entropy(
    entropies: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    fraction: float = 0.2,
    all_reduce: AllReduce | None = None,
) -> TokenMask:
    """Keep the tokens with the highest entropy: beyond the 80/20 rule, Wang et al. 2025 (arXiv:2506.01939).

    A token is kept if its entropy is at least the (1 − fraction)-quantile of all valid tokens, so that a fifth of the
    tokens, at which the reasoning branches, gets the whole policy gradient. Ties with the last one are kept.

    The quantile is that of the whole step: call this once before the batch is split, or give ``all_reduce``. TRL and
    ms-swift compute it per micro-batch, so that their loss depends on the split.

    Args:
        entropies: float (B, T) or (N,): of the policy at each token, in nats.
        response_mask: bool, like entropies.
        cu_seqlens: int (B+1,) if packed; not used.
        fraction: the share of the tokens to keep, above 0 and at most 1.
        all_reduce: sums a tensor over the ranks, if the step is split over ranks; None: it is whole.

    Returns:
        bool, like entropies: True on kept tokens, at least one if any token is valid; False outside the mask.

    Raises:
        ValueError: wrong shapes or dtypes; a fraction outside (0, 1].

    >>> m = torch.tensor([[True] * 5 + [False]])
    >>> high_entropy(torch.tensor([[0.1, 2.0, 0.3, 0.2, 0.0, 9.0]]), m, fraction=0.4).tolist()
    [[False, True, True, False, False, False]]
    """
    check_tokens(response_mask, cu_seqlens, entropies=entropies)
    _check_fraction(fraction)
    # The quantile is (n − 1) · fraction places below the largest of n tokens: this many are at or above it.
    count = _share(fraction, (_over_ranks(all_reduce, response_mask.sum()) - 1).clamp(min=0)) + 1
    return _largest(zero_outside(entropies, response_mask), response_mask, count, all_reduce)


def m2po(
    log_probs: PerToken,
    rollout_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    tau: float = 0.04,
    all_reduce: AllReduce | None = None,
) -> TokenMask:
    """Drop the tokens that are farthest off policy: M2PO, Zheng et al. 2025 (arXiv:2510.01161).

    With d = log_probs − rollout_log_probs, the tokens with the smallest d² are kept: as many as have a mean d² of at
    most τ. Unlike in a mean of d, positive and negative d do not cancel. A few extreme tokens are dropped, and no other
    token is clipped, even in stale responses.

    The mean is that of the whole step: call this once before the batch is split, or give ``all_reduce``. AReaL computes
    it per micro-batch and always keeps one token. Tokens that tie are kept or dropped together.

    Args:
        log_probs: float (B, T) or (N,), the policy before the update; it gets no gradient here.
        rollout_log_probs: float, like log_probs: the policy that sampled.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed; not used.
        tau: τ, the largest mean of d², in nats²; at least 0.
        all_reduce: sums a tensor over the ranks, if the step is split over ranks; None: it is whole.

    Returns:
        bool, like log_probs: True on kept tokens; False on the others and outside the mask.

    Raises:
        ValueError: wrong shapes or dtypes; a negative tau.

    >>> m = torch.ones(1, 4, dtype=torch.bool)
    >>> m2po(torch.tensor([[0.0, -0.5, 0.1, 0.2]]), torch.zeros(1, 4), m).tolist()
    [[True, False, True, True]]
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, rollout_log_probs=rollout_log_probs)
    if tau < 0:
        raise ValueError(f"tau={tau}, expected at least 0, in nats²")
    difference = zero_outside(log_probs, response_mask) - zero_outside(rollout_log_probs, response_mask)
    squares = difference.detach().square()
    if all_reduce is not None:
        return _of_small_mean(squares, response_mask, tau, all_reduce)
    ascending = torch.where(response_mask, squares, torch.inf).flatten().sort().values
    # The mean of the smallest k grows with k, so the number of means that are at most τ is the largest such k.
    means = ascending.cumsum(0) / torch.arange(1, ascending.shape[0] + 1, device=ascending.device)
    kept = (means <= tau).sum()
    smallest_dropped = torch.cat([ascending, ascending.new_full((1,), torch.inf)]).gather(0, kept.reshape(1))
    return response_mask & (squares < smallest_dropped)


def finite_tokens(
    rollout_log_probs: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None
) -> TokenMask:
    """Keep the valid tokens whose log-prob from the sampler is finite: not NaN and not infinite.

    Engines report NaN if their numerics fail, and −inf for a token that their mask forbids. Use the result instead of
    ``response_mask`` in all that follows: then such a token is in no loss and in no denominator, as in torchtitan. TRL
    keeps the token with importance weight 1: for this use
    ``corrections.replace_nonfinite(rollout_log_probs, old_log_probs, response_mask)``.

    Args:
        rollout_log_probs: float (B, T) or (N,): the sampler's own.
        response_mask: bool, like rollout_log_probs.
        cu_seqlens: int (B+1,) if packed; not used.

    Returns:
        bool, like rollout_log_probs; False outside the mask.

    Raises:
        ValueError: wrong shapes or dtypes.

    >>> finite_tokens(torch.tensor([[-1.0, torch.nan, -torch.inf]]), torch.ones(1, 3, dtype=torch.bool)).tolist()
    [[True, False, False]]
    """
    check_tokens(response_mask, cu_seqlens, rollout_log_probs=rollout_log_probs)
    return response_mask & rollout_log_probs.isfinite()


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction}, expected a share of the tokens, above 0 and at most 1")


def _over_ranks(all_reduce: AllReduce | None, x: Tensor) -> Tensor:
    return x if all_reduce is None else all_reduce(x)


def _covariance(log_probs: PerToken, advantages: PerToken, mask: TokenMask, all_reduce: AllReduce | None) -> PerToken:
    """(log π − mean log π)(A − mean A), both means over all valid tokens (arXiv:2505.22617); undefined elsewhere."""
    log_probs, advantages = zero_outside(log_probs.detach(), mask), zero_outside(advantages.detach(), mask)
    tokens = _over_ranks(all_reduce, mask.sum()).clamp(min=1)
    centred_log_probs = log_probs - _over_ranks(all_reduce, log_probs.sum()) / tokens
    centred_advantages = advantages - _over_ranks(all_reduce, advantages.sum()) / tokens
    return centred_log_probs * centred_advantages


def _share(fraction: float, count: Tensor) -> Tensor:
    """⌊fraction · count⌋, int64 (). The small number added allows for the rounding of the product."""
    return (fraction * count.double() + 1e-4).floor().long()


def _largest(x: Tensor, mask: TokenMask, count: Tensor, all_reduce: AllReduce | None = None) -> TokenMask:
    """True on the ``count`` (at least 1) largest valid numbers of the whole batch, and on all that tie with the last.

    The selection therefore depends neither on the order of the tokens nor on padding.

    >>> _largest(torch.tensor([[3, 9, 5, 5]]), torch.tensor([[True, False, True, True]]), torch.tensor(1)).tolist()
    [[False, False, True, True]]
    """
    if all_reduce is not None:
        return _largest_over_ranks(x, mask, count, all_reduce)
    lowest = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    descending = torch.where(mask, x, lowest).flatten().sort(descending=True).values
    descending = torch.cat([descending, descending.new_full((1,), lowest)])  # so an empty batch has a threshold too
    return mask & (x >= descending.gather(0, count.reshape(1) - 1))


def _largest_over_ranks(x: Tensor, mask: TokenMask, count: Tensor, all_reduce: AllReduce) -> TokenMask:
    """:func:`_largest` over all ranks: the tokens at or above the largest threshold that ``count`` tokens reach."""
    keys = _ordered(x)
    ascending = torch.where(mask, keys, torch.iinfo(torch.int64).min).flatten().sort().values

    def enough_tokens(thresholds: Tensor) -> Tensor:
        return all_reduce(ascending.shape[0] - torch.searchsorted(ascending, thresholds)) >= count

    return mask & (keys >= _largest_true(enough_tokens, keys)) & ~x.isnan()


def _of_small_mean(squares: PerToken, mask: TokenMask, tau: float, all_reduce: AllReduce) -> TokenMask:
    """True on the smallest numbers of all ranks, as many as have a mean of at most τ; ties stay together."""
    keys = _ordered(squares)
    ascending, order = torch.where(mask, keys, torch.iinfo(torch.int64).max).flatten().sort()
    sums = torch.cat([squares.new_zeros(1, dtype=torch.float64), squares.flatten()[order].double().cumsum(0)])

    def mean_is_small(thresholds: Tensor) -> Tensor:
        up_to = torch.minimum(torch.searchsorted(ascending, thresholds, right=True), mask.sum())
        total, number = all_reduce(torch.stack([sums[up_to], up_to.double()])).unbind()
        return total <= tau * number

    return mask & (keys <= _largest_true(mean_is_small, keys))


def _largest_true(condition: Callable[[Tensor], Tensor], keys: Tensor) -> Tensor:
    """The largest int64 at which a monotone condition is true, found in 8 steps of 256 trials."""
    digits = torch.arange(256, device=keys.device)
    largest = torch.full((), torch.iinfo(torch.int64).min, device=keys.device)
    for shift in range(56, -8, -8):
        largest = largest + ((condition(largest + (digits << shift)).sum() - 1).clamp(min=0) << shift)
    return largest


def _ordered(x: Tensor) -> Tensor:
    """int64 in the same order as the numbers: the bits of a float64, with negative numbers inverted (−0.0 is 0.0)."""
    if not x.is_floating_point():
        return x
    bits = torch.where(x.isnan(), torch.nan, x.double() + 0.0).view(torch.int64)
    return torch.where(bits < 0, bits ^ torch.iinfo(torch.int64).max, bits)


def _noise(seed: Tensor, mask: TokenMask, tokens_before: Tensor | int) -> Tensor:
    """An int64 for each valid token, all different: Weyl's sequence, mixed as in splitmix64 (Steele et al. 2014)."""
    x = seed + (mask.flatten().cumsum(0) + tokens_before) * -7046029254386353131
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return (x ^ (x >> 31)).reshape(mask.shape)
