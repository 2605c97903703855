"""Presets that choose tokens: which of them the policy loss, or a penalty, is on."""

import math
from typing import Literal

from rlprims import advantage, filters, losses
from rlprims.algorithms._adapters import kl_to_old
from rlprims.algorithms._algorithm import Algorithm, LossTerm
from rlprims.algorithms._use import use
from rlprims.algorithms.presets._dialects import Dialect, in_dialect
from rlprims.algorithms.presets._group import dapo

_UNCLIPPED = use(losses.clipped_surrogate, clip_low=1.0, clip_high=math.inf)


def clip_cov(*, fraction: float = 2e-4) -> Algorithm:
    """Clip-Cov (Cui et al. 2025, arXiv:2505.22617): a few tokens of high covariance, drawn at random, get no gradient.

    Where a likely token is praised or an unlikely one blamed the policy becomes certain; leaving out one such token in
    5000 is enough to keep its entropy. The rest is GRPO with a mean over tokens.
    """
    return Algorithm(
        name="clip_cov",
        group_size=8,
        advantage=use(advantage.grpo),
        token_selection=use(filters.clip_cov, fraction=fraction),
    )


def kl_cov(*, fraction: float = 2e-3, kl_coef: float = 1.0, dialect: Dialect | None = None) -> Algorithm:
    """KL-Cov (Cui et al. 2025, arXiv:2505.22617): the tokens of the largest covariance are held to the old policy.

    No clip: the ratio is free, and |log ratio| is a penalty on that fraction of the tokens alone. It is 0 at the first
    update of a batch, so there are four, a number of ours.
    """
    held = LossTerm(coefficient=kl_coef, loss=use(kl_to_old), tokens=use(filters.kl_cov, fraction=fraction))
    return in_dialect(
        Algorithm(
            name="kl_cov",
            group_size=8,
            advantage=use(advantage.grpo),
            policy_loss=_UNCLIPPED,
            loss_terms=(held,),
            mini_batches=4,
        ),
        dialect,
    )


def high_entropy(
    *, fraction: float = 0.2, max_length: int = 20480, buffer_length: int = 4096, metric: str = "acc"
) -> Algorithm:
    """Beyond the 80/20 rule (Wang et al. 2025, arXiv:2506.01939): DAPO on the fifth of the tokens with most entropy.

    The forks of the reasoning get the whole policy gradient; what follows from them gets none. The mean is still over
    all tokens.
    """
    return dapo(max_length=max_length, buffer_length=buffer_length, metric=metric).replace(
        name="high_entropy", token_selection=use(filters.high_entropy, fraction=fraction)
    )


def m2po(*, tau: float = 0.04) -> Algorithm:
    """M2PO (Zheng et al. 2025, arXiv:2510.01161): stale responses, of which the tokens farthest off policy are dropped.

    The ratio is to the policy that sampled and is not clipped: a bound on its second moment over the batch, met by
    leaving out the fewest tokens, takes the place of the clip.
    """
    return Algorithm(
        name="m2po",
        group_size=8,
        advantage=use(advantage.grpo),
        token_selection=use(filters.m2po, tau=tau),
        policy_loss=use(losses.dppo, threshold_low=math.inf, threshold_high=math.inf),
    )


def bapo(*, target: float = 0.5, first: Literal["high", "low"] = "high") -> Algorithm:
    """BAPO (Xi et al. 2025, arXiv:2510.18927): each update chooses the clip's bounds, so that praise is not outweighed.

    Stale responses that are blamed come to dominate PPO's objective, and its fixed clip keeps out the unlikely tokens
    that are praised. The bounds rise until praise is the share ``target`` of the objective. Two passes over a batch of
    four mini-batches, in the authors' example; at a batch's first update every ratio is 1 and nothing is clipped.
    """
    return Algorithm(
        name="bapo",
        group_size=16,
        advantage=use(advantage.grpo),
        token_selection=use(filters.bapo, target=target, first=first),
        policy_loss=_UNCLIPPED,
        epochs=2,
        mini_batches=4,
    )
