"""Presets with the plain policy gradient: no ratio, and one update per batch."""

from rlprims import advantage, losses
from rlprims.algorithms._algorithm import Algorithm
from rlprims.algorithms._use import use
from rlprims.algorithms.presets._dialects import Dialect, in_dialects


def reinforce() -> Algorithm:
    """REINFORCE (Williams 1992): the return times the score function, with no baseline.

    With rewards of 0 and 1 it trains on correct answers only. A constant added to all rewards changes its gradient's
    variance; a baseline removes this dependence.
    """
    return Algorithm(name="reinforce", advantage=advantage.discounted_returns, policy_loss=losses.reinforce)


@in_dialects
def rloo(*, dialect: Dialect | None = None) -> Algorithm:
    """RLOO (Ahmadian et al. 2024, arXiv:2402.14740): REINFORCE with the mean of the prompt's other samples as baseline.

    The paper's objective is neither clipped nor divided by the length. For RLHF add ``kl_in_reward``.
    """
    return Algorithm(
        name="rloo",
        group_size=4,
        advantage=advantage.rloo,
        policy_loss=losses.reinforce,
        aggregation=losses.seq_mean_token_sum,
    )


@in_dialects
def remax(*, dialect: Dialect | None = None) -> Algorithm:
    """ReMax (Li et al. 2023, arXiv:2310.10505): REINFORCE with the score of the greedy response as baseline.

    It needs one more generation per prompt and no critic. For RLHF add ``kl_in_reward``.
    """
    return Algorithm(
        name="remax", advantage=advantage.remax, policy_loss=losses.reinforce, aggregation=losses.seq_mean_token_sum
    )


def spo() -> Algorithm:
    """SPO (Xu & Ding 2025, arXiv:2509.13232): one response per prompt, with the prompt's earlier pass rate as baseline.

    A ``ValueTracker`` stores each prompt's pass rate, which decays as the policy changes; s − v is normalized over the
    batch. Scores must be from 0 to 1. The clip is PPO's. The paper starts with pass rates that are sampled from the
    first policy; here a new prompt has ½.
    """
    return Algorithm(
        name="spo", baseline=advantage.ValueTracker, advantage=advantage.spo, policy_loss=losses.clipped_surrogate
    )


@in_dialects
def opo(*, dialect: Dialect | None = None) -> Algorithm:
    """OPO (Hao et al. 2025, arXiv:2505.23585): exact on-policy updates with the length-weighted optimal baseline."""
    return Algorithm(
        name="opo",
        group_size=8,
        advantage=advantage.opo,
        policy_loss=losses.reinforce,
        aggregation=losses.seq_mean_token_sum,
    )


def maxrl() -> Algorithm:
    """MaxRL (Tajwar et al. 2026, arXiv:2602.02710): centred rewards divided by the group's mean reward.

    Hard prompts therefore have more weight. The scores must be at least 0. For large groups the gradient is that of the
    log-likelihood of a correct answer.
    """
    return Algorithm(
        name="maxrl",
        group_size=16,
        advantage=advantage.maxrl,
        policy_loss=losses.reinforce,
        aggregation=losses.seq_mean_token_sum,
    )


@in_dialects
def gpg(*, dialect: Dialect | None = None) -> Algorithm:
    """GPG (arXiv:2504.02546): REINFORCE with centred rewards, rescaled for groups of equal rewards."""
    return Algorithm(name="gpg", group_size=8, advantage=advantage.gpg, policy_loss=losses.reinforce)


def pkpo(*, k: int = 4) -> Algorithm:
    """PKPO (arXiv:2505.15201): the unbiased gradient of the best of k samples, from groups of more than k."""
    return Algorithm(
        name="pkpo",
        group_size=16,
        advantage=use(advantage.pkpo, k=k),
        policy_loss=losses.reinforce,
        aggregation=losses.seq_mean_token_sum,
    )


def w_reinforce(*, positive: float = 0.1) -> Algorithm:
    """W-REINFORCE (arXiv:2506.01347): wrong answers have weight 1 and correct ones the weight ``positive``.

    The scores must be 1 and −1, because a wrong answer with score 0 has no gradient. ``positive=0`` is the paper's NSR.
    """
    return Algorithm(
        name="w_reinforce",
        advantage=advantage.discounted_returns,
        normalization=use(advantage.positive_negative, positive=positive),
        policy_loss=losses.reinforce,
    )


def asymre(*, shift: float = -0.1) -> Algorithm:
    """AsymRE (arXiv:2506.20520): REINFORCE with a baseline below the group's mean, for stale responses."""
    return Algorithm(
        name="asymre",
        group_size=8,
        advantage=use(advantage.grpo, normalize_std=False),
        policy_loss=use(losses.asymre, shift=shift),
        aggregation=losses.seq_mean_token_sum,
    )
