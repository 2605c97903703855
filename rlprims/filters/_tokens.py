"""Selection of tokens: one bool per token, from statistics of all valid tokens of the step.

``cu_seqlens`` is only checked: the statistics are over tokens and do not depend on the sequences. They are those of the
whole step: call a function once before the batch is split, or give ``all_reduce``; the ranks then exchange counts, not
tokens. Peers compute them per micro-batch, so that their selection depends on the split.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.masking import check_at_least, check_tokens, zero_outside
from rlprims.types import AllReduce, CuSeqlens, PerToken, TokenMask


@described
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

    The means and the number of tokens are those of the whole step. verl and SkyRL draw at least one token in each
    micro-batch, by the global generator, and never one that PPO clips already; before the first update it clips none.
    Here the draw is a hash of one number from the generator and the token's place among the valid ones: the same for
    padded and packed tokens and on every device.

    Args:
        log_probs: the policy before the update; it gets no gradient here.
        low, high: the band of covariance to draw from, in units of the advantage; low < high.
        generator: the source of the random number; on any device, and in the same state on all ranks.
        tokens_before: with all_reduce: the number of valid tokens on the ranks before this one, for a token's place.

    >>> m = torch.ones(1, 4, dtype=torch.bool)
    >>> log_probs, advantages = torch.tensor([[-0.1, -3.0, -0.1, -3.0], [2.0, 1.0, -1.0, -1.0]])[:, None]
    >>> clip_cov(log_probs, advantages, m, generator=torch.Generator().manual_seed(0)).tolist()
    [[True, True, True, False]]
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, advantages=advantages)
    _check_fraction(fraction)
    if not low < high:
        raise ValueError(f"low={low} and high={high}, expected low < high: the band would be empty")
    if generator is None:
        raise ValueError("generator is None, expected a torch.Generator, so that the draw can be repeated")
    covariance = _covariance(log_probs, advantages, response_mask, all_reduce)
    in_band = response_mask & (low < covariance) & (covariance < high)
    seed = torch.randint(2**62, (1,), generator=generator, device=generator.device).to(response_mask.device)
    count = _share(fraction, _over_ranks(all_reduce, response_mask.sum())).clamp(min=1)
    drawn = _largest(_noise(seed, response_mask, tokens_before), in_band, count, all_reduce)
    return response_mask & ~drawn


@described
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
    and for an unlikely token with a low one: the updates that lower the entropy. Add a KL penalty on these tokens only:
    ``losses + torch.where(kl_cov(...), kl_coef * kl(log_probs, old_log_probs, response_mask, value="abs"), 0.0)``. The
    means and the order are those of the whole step: call this once before the batch is split, or give ``all_reduce``.
    verl and SkyRL select at least one token of each micro-batch.

    Args:
        log_probs: the policy before the update; it gets no gradient here.
        fraction: the share of the tokens to select, above 0 and at most 1; the paper has 2e-3 (7B) and 2e-4 (32B).

    Returns:
        True on selected tokens, at least one if any token is valid, and all that tie with the last; else False.

    >>> m = torch.ones(1, 4, dtype=torch.bool)
    >>> kl_cov(torch.tensor([[-0.1, -3.0, -0.1, -3.0]]), torch.tensor([[2.0, 1.0, -1.0, -1.0]]), m).tolist()
    [[True, False, False, False]]
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, advantages=advantages)
    _check_fraction(fraction)
    covariance = _covariance(log_probs, advantages, response_mask, all_reduce)
    count = _share(fraction, _over_ranks(all_reduce, response_mask.sum())).clamp(min=1)
    return _largest(covariance, response_mask, count, all_reduce)


@described
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
    tokens, at which the reasoning branches, gets the whole policy gradient; at least one, and all that tie with the
    last. The quantile is that of the whole step: call this once before the batch is split, or give ``all_reduce``.
    TRL's and ms-swift's is that of a micro-batch.

    >>> m = torch.tensor([[True] * 5 + [False]])
    >>> high_entropy(torch.tensor([[0.1, 2.0, 0.3, 0.2, 0.0, 9.0]]), m, fraction=0.4).tolist()
    [[False, True, True, False, False, False]]
    """
    check_tokens(response_mask, cu_seqlens, entropies=entropies)
    _check_fraction(fraction)
    # The quantile is (n − 1) · fraction places below the largest of n tokens: this many are at or above it.
    count = _share(fraction, (_over_ranks(all_reduce, response_mask.sum()) - 1).clamp(min=0)) + 1
    return _largest(zero_outside(entropies, response_mask), response_mask, count, all_reduce)


@described
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
    most ``tau``, in nats², at least 0. Unlike in a mean of d, opposite signs do not cancel. No other token is clipped.

    The mean is that of the whole step: call this once before the batch is split, or give ``all_reduce``. AReaL computes
    it per micro-batch and always keeps one token. Tokens that tie are kept or dropped together.

    Args:
        log_probs: the policy before the update; it gets no gradient here.

    >>> m = torch.ones(1, 4, dtype=torch.bool)
    >>> m2po(torch.tensor([[0.0, -0.5, 0.1, 0.2]]), torch.zeros(1, 4), m).tolist()
    [[True, False, True, True]]
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, rollout_log_probs=rollout_log_probs)
    check_at_least(0, ", in nats²", inf=True, tau=tau)
    difference = zero_outside(log_probs, response_mask) - zero_outside(rollout_log_probs, response_mask)
    squares = difference.detach().square()
    keys = _ordered(squares)

    def mean_is_small(threshold: Tensor) -> Tensor:
        smallest = response_mask & (keys <= threshold)
        sums = torch.stack([squares.where(smallest, 0.0).sum(dtype=torch.float64), smallest.sum().double()])
        total, number = _over_ranks(all_reduce, sums).unbind()
        return total <= tau * number

    return response_mask & (keys <= _largest_true(mean_is_small, keys))


@described
def finite_tokens(
    rollout_log_probs: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None
) -> TokenMask:
    """Keep the valid tokens whose log-prob from the sampler is finite: not NaN and not infinite.

    Engines report NaN if their numerics fail, and −inf for a token that their mask forbids. Use the result instead of
    ``response_mask`` in all that follows: then such a token is in no loss and in no denominator, as in torchtitan. TRL
    keeps the token with importance weight 1: for this use ``corrections.replace_nonfinite``.

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

    >>> _largest(torch.tensor([[3, 9, 5, 5]]), torch.tensor([[True, False, True, True]]), torch.tensor(1)).tolist()
    [[False, False, True, True]]
    """
    keys = _ordered(x)

    def enough_tokens(threshold: Tensor) -> Tensor:
        return _over_ranks(all_reduce, (mask & (keys >= threshold)).sum()) >= count

    return mask & (keys >= _largest_true(enough_tokens, keys)) & ~x.isnan()


def _largest_true(condition: Callable[[Tensor], Tensor], keys: Tensor) -> Tensor:
    """The largest integer of the keys' dtype at which a condition is true that is false above it: bit by bit."""
    limits = torch.iinfo(keys.dtype)
    zero = torch.zeros((), dtype=keys.dtype, device=keys.device)
    largest = torch.where(condition(zero), zero, zero + limits.min)
    for bit in reversed(range(limits.bits - 1)):
        trial = largest + (1 << bit)
        largest = torch.where(condition(trial), trial, largest)
    return largest


def _ordered(x: Tensor) -> Tensor:
    """Integers in the order of the floats: their bits, inverted for negative ones. −0.0 is 0.0, and NaN the largest."""
    if not x.is_floating_point():
        return x
    dtype = torch.int64 if x.dtype is torch.float64 else torch.int32
    bits = torch.where(x.isnan(), torch.nan, x + 0.0).view(dtype)
    return torch.where(bits < 0, bits ^ torch.iinfo(dtype).max, bits)


def _noise(seed: Tensor, mask: TokenMask, tokens_before: Tensor | int) -> Tensor:
    """An int64 for each valid token, all different: the generator splitmix64 (Steele et al. 2014), started at seed."""
    x = seed + (mask.flatten().cumsum(0) + tokens_before) * -7046029254386353131
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return (x ^ (x >> 31)).reshape(mask.shape)
