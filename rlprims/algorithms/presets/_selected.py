"""Presets that select tokens, or that also learn from tokens of others: tool output, experts, demonstrations."""

import math
from typing import Literal

from rlprims import advantage, filters, losses
from rlprims.algorithms._adapters import kl_to_old
from rlprims.algorithms._algorithm import Algorithm, LossTerm
from rlprims.algorithms._use import use
from rlprims.algorithms.presets._dialects import Dialect, in_dialects
from rlprims.algorithms.presets._group import dapo, dr_grpo

_UNCLIPPED = use(losses.clipped_surrogate, clip_low=1.0, clip_high=math.inf)


def clip_cov(*, fraction: float = 2e-4) -> Algorithm:
    """Clip-Cov (Cui et al. 2025, arXiv:2505.22617): a few tokens of high covariance, drawn at random, get no gradient.

    Rewarding likely and penalizing unlikely tokens lowers the entropy; dropping one such token in 5000 keeps it. The
    rest is GRPO with a mean over tokens.
    """
    selection = use(filters.clip_cov, fraction=fraction)
    return Algorithm(name="clip_cov", group_size=8, advantage=advantage.grpo, token_selection=selection)


@in_dialects
def kl_cov(*, fraction: float = 2e-3, kl_coef: float = 1.0, dialect: Dialect | None = None) -> Algorithm:
    """KL-Cov (Cui et al. 2025, arXiv:2505.22617): a KL penalty on the tokens with the largest covariance.

    There is no clip; |log ratio| is a penalty on that fraction of the tokens only. It is 0 at the first update of a
    batch, so there are four updates per batch (our choice).
    """
    kl = LossTerm(coefficient=kl_coef, loss=kl_to_old, tokens=use(filters.kl_cov, fraction=fraction))
    return Algorithm(
        name="kl_cov", group_size=8, advantage=advantage.grpo, policy_loss=_UNCLIPPED, loss_terms=(kl,), mini_batches=4
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
    tokens, loss = use(filters.m2po, tau=tau), use(losses.dppo, threshold_low=math.inf, threshold_high=math.inf)
    return Algorithm(name="m2po", group_size=8, advantage=advantage.grpo, token_selection=tokens, policy_loss=loss)


def bapo(*, target: float = 0.5, first: Literal["high", "low"] = "high") -> Algorithm:
    """BAPO (Xi et al. 2025, arXiv:2510.18927): clip bounds per update that balance positive and negative advantages.

    On stale responses tokens with A < 0 dominate PPO's objective, and its fixed clip drops unlikely tokens with A > 0.
    The bounds are raised until tokens with A > 0 have the share ``target`` of the objective. As in the authors'
    example, there are two passes over a batch of four mini-batches. At a batch's first update no token is clipped.
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


def echo(*, observation_coef: float = 0.1) -> Algorithm:
    """ECHO (arXiv:2605.24517): GRPO on the policy's tokens plus the likelihood of the environment's tokens.

    Rollouts that all fail still have tool output to learn from. The second term is λ = ``observation_coef`` times the
    mean of −log π over ``observation_mask``, which ``turns.to_batch`` computes. Each mean is over its own tokens, so
    long tool output does not shrink the policy gradient. λ is prime-rl's; its mask omits chat template and warnings.
    """
    observations = LossTerm(
        coefficient=observation_coef,
        loss=losses.nll,
        mask="observation_mask",
        aggregation=losses.token_mean,
        over="term",
    )
    return Algorithm(name="echo", group_size=8, advantage=advantage.grpo, loss_terms=(observations,))


def luffy(*, gamma: float = 0.1, max_length: int = 8192) -> Algorithm:
    """LUFFY (Yan et al. 2025, arXiv:2504.14945): groups of one expert response and seven responses of the policy.

    The baseline includes the expert's score, so the expert response has a large advantage if the policy fails. The loss
    of its tokens is −A π / (π + γ), whose gradient is largest for tokens that are unlikely under the policy. As in the
    authors' runs, advantages are not divided by the std, and the sum over a response is divided by the constant
    ``max_length``. ``expert_mask`` (B, T) is True on the expert's tokens of ``response_mask``.
    """
    return dr_grpo(max_length=max_length).replace(name="luffy", policy_loss=use(losses.luffy, gamma=gamma))


def chord(*, mu: float = 0.1) -> Algorithm:
    """CHORD-φ (Zhang et al. 2025, arXiv:2508.11408): (1 − μ) · GRPO + μ · a weighted likelihood of demonstrations.

    Demonstrations are separate rows, whose tokens are in ``expert_mask`` and not in ``response_mask``. The weight of a
    token is p (1 − p), which is small if p is near 0 or 1. Each of the two means is over its own tokens.
    For CHORD-μ, which lowers μ over the run, build a new algorithm for each step: ``chord(mu=...)``.
    """
    demonstrations = LossTerm(coefficient=mu, loss=losses.chord_phi, mask="expert_mask", over="term")
    return Algorithm(
        name="chord", group_size=8, advantage=advantage.grpo, policy_coefficient=1 - mu, loss_terms=(demonstrations,)
    )


def sft() -> Algorithm:
    """Supervised fine-tuning: the negative log-likelihood of every response, a mean over tokens.

    The advantages are returns, which the loss does not use. On samples of the policy that a filter or a
    ``token_selection`` of ``algorithms.is_correct`` keeps, it is rejection sampling. DFT (arXiv:2508.05629) is
    ``replace(policy_loss=losses.dft)``.
    """
    return Algorithm(name="sft", advantage=advantage.discounted_returns, policy_loss=losses.nll)
