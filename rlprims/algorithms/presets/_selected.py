"""Presets that select the tokens of the policy loss or of a penalty."""

import math
from typing import Literal

from rlprims import advantage, filters, losses
from rlprims.algorithms._adapters import kl_to_old
from rlprims.algorithms._algorithm import Algorithm, LossTerm
from rlprims.algorithms._use import use
from rlprims.algorithms.presets._dialects import Dialect, in_dialects
from rlprims.algorithms.presets._group import dapo

_UNCLIPPED = use(losses.clipped_surrogate, clip_low=1.0, clip_high=math.inf)


def clip_cov(*, fraction: float = 2e-4) -> Algorithm:
    """Clip-Cov (Cui et al. 2025, arXiv:2505.22617): a few tokens of high covariance, drawn at random, get no gradient.

    Rewarding likely tokens and penalizing unlikely ones lowers the entropy. Dropping one such token in 5000 is enough
    to keep the entropy. The rest is GRPO with a mean over tokens.
    """
    return Algorithm(
        name="clip_cov",
        group_size=8,
        advantage=advantage.grpo,
        token_selection=use(filters.clip_cov, fraction=fraction),
    )


@in_dialects
def kl_cov(*, fraction: float = 2e-3, kl_coef: float = 1.0, dialect: Dialect | None = None) -> Algorithm:
    """KL-Cov (Cui et al. 2025, arXiv:2505.22617): a KL penalty on the tokens with the largest covariance.

    There is no clip; |log ratio| is a penalty on that fraction of the tokens only. It is 0 at the first update of a
    batch, so there are four updates per batch (our choice).
    """
    penalty = LossTerm(coefficient=kl_coef, loss=kl_to_old, tokens=use(filters.kl_cov, fraction=fraction))
    return Algorithm(
        name="kl_cov",
        group_size=8,
        advantage=advantage.grpo,
        policy_loss=_UNCLIPPED,
        loss_terms=(penalty,),
        mini_batches=4,
    )


def high_entropy(
    *, fraction: float = 0.2, max_length: int = 20480, buffer_length: int = 4096, metric: str = "acc"
) -> Algorithm:
    """Beyond the 80/20 rule (Wang et al. 2025, arXiv:2506.01939): DAPO on the 20 % of tokens with the highest entropy.

    Only these tokens, at which the reasoning branches, have a policy gradient. The mean is still over all tokens.
    """
    return dapo(max_length=max_length, buffer_length=buffer_length, metric=metric).replace(
        name="high_entropy", token_selection=use(filters.high_entropy, fraction=fraction)
    )


def m2po(*, tau: float = 0.04) -> Algorithm:
    """M2PO (Zheng et al. 2025, arXiv:2510.01161): for stale responses, drops the tokens that are farthest off policy.

    The ratio is to the policy that sampled and is not clipped. Instead, the smallest number of tokens is dropped such
    that the second moment of the log-ratio over the batch is within a bound.
    """
    return Algorithm(
        name="m2po",
        group_size=8,
        advantage=advantage.grpo,
        token_selection=use(filters.m2po, tau=tau),
        policy_loss=use(losses.dppo, threshold_low=math.inf, threshold_high=math.inf),
    )


def bapo(*, target: float = 0.5, first: Literal["high", "low"] = "high") -> Algorithm:
    """BAPO (Xi et al. 2025, arXiv:2510.18927): clip bounds per update that balance positive and negative advantages.

    On stale responses tokens with A < 0 dominate PPO's objective, and its fixed clip drops unlikely tokens with A > 0.
    The bounds are raised until tokens with A > 0 have the share ``target`` of the objective. As in the authors'
    example, there are two passes over a batch of four mini-batches. At the first update of a batch every ratio is 1 and
    no token is clipped.
    """
    return Algorithm(
        name="bapo",
        group_size=16,
        advantage=advantage.grpo,
        token_selection=use(filters.bapo, target=target, first=first),
        policy_loss=_UNCLIPPED,
        epochs=2,
        mini_batches=4,
    )
