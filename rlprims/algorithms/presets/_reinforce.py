"""Presets that follow the policy gradient itself: no ratio, and one update for each batch."""

from rlprims import advantage, losses
from rlprims.algorithms._algorithm import Algorithm
from rlprims.algorithms._use import use
from rlprims.algorithms.presets._dialects import Dialect, in_dialect


def reinforce() -> Algorithm:
    """REINFORCE (Williams 1992): the return times the score function, with no baseline.

    With a reward of 0 or 1 it trains on right answers only; shift the reward and it becomes another algorithm, which
    is what baselines are for.
    """
    return Algorithm(name="reinforce", advantage=use(advantage.discounted_returns), policy_loss=use(losses.reinforce))


def rloo(*, dialect: Dialect | None = None) -> Algorithm:
    """RLOO (Ahmadian et al. 2024, arXiv:2402.14740): REINFORCE; the mean of a prompt's other samples is the baseline.

    The paper's objective is neither clipped nor divided by length. For RLHF add ``kl_in_reward``.
    """
    return in_dialect(
        Algorithm(
            name="rloo",
            group_size=4,
            advantage=use(advantage.rloo),
            policy_loss=use(losses.reinforce),
            aggregation=use(losses.seq_mean_token_sum),
        ),
        dialect,
    )


def remax(*, dialect: Dialect | None = None) -> Algorithm:
    """ReMax (Li et al. 2023, arXiv:2310.10505): REINFORCE; the score of the greedy response is the baseline.

    One more generation per prompt, and no critic. For RLHF add ``kl_in_reward``.
    """
    return in_dialect(
        Algorithm(
            name="remax",
            advantage=use(advantage.remax),
            policy_loss=use(losses.reinforce),
            aggregation=use(losses.seq_mean_token_sum),
        ),
        dialect,
    )


def spo() -> Algorithm:
    """SPO (Xu & Ding 2025, arXiv:2509.13232): one response per prompt, compared with the prompt's own history.

    A ``ValueTracker`` remembers each prompt's pass rate, and forgets as the policy moves; s − v is normalized over the
    batch. Scores must be from 0 to 1. The clip is PPO's. The paper begins with pass rates of the first policy, sampled
    beforehand; here a new prompt has ½.
    """
    return Algorithm(
        name="spo",
        baseline=use(advantage.ValueTracker),
        advantage=use(advantage.spo),
        policy_loss=use(losses.clipped_surrogate),
    )


def opo(*, dialect: Dialect | None = None) -> Algorithm:
    """OPO (Hao et al. 2025, arXiv:2505.23585): exactly on policy, with the length-weighted optimal baseline."""
    return in_dialect(
        Algorithm(
            name="opo",
            group_size=8,
            advantage=use(advantage.opo),
            policy_loss=use(losses.reinforce),
            aggregation=use(losses.seq_mean_token_sum),
        ),
        dialect,
    )


def maxrl() -> Algorithm:
    """MaxRL (Tajwar et al. 2026, arXiv:2602.02710): advantages over the group's mean, so hard prompts weigh more.

    The scores must not be negative. As the group grows its gradient becomes that of the maximum likelihood of success.
    """
    return Algorithm(
        name="maxrl",
        group_size=16,
        advantage=use(advantage.maxrl),
        policy_loss=use(losses.reinforce),
        aggregation=use(losses.seq_mean_token_sum),
    )


def gpg(*, dialect: Dialect | None = None) -> Algorithm:
    """GPG (arXiv:2504.02546): centred rewards and the plain score function, rescaled for the groups that teach."""
    return in_dialect(
        Algorithm(
            name="gpg",
            group_size=8,
            advantage=use(advantage.gpg),
            policy_loss=use(losses.reinforce),
        ),
        dialect,
    )


def pkpo(*, k: int = 4) -> Algorithm:
    """PKPO (arXiv:2505.15201): the unbiased gradient of the best of k samples, from groups of more than k."""
    return Algorithm(
        name="pkpo",
        group_size=16,
        advantage=use(advantage.pkpo, k=k),
        policy_loss=use(losses.reinforce),
        aggregation=use(losses.seq_mean_token_sum),
    )


def w_reinforce(*, positive: float = 0.1) -> Algorithm:
    """W-REINFORCE (arXiv:2506.01347): wrong answers teach with weight 1 and right ones with ``positive``.

    The scores must be 1 and −1: with 0 and 1 there is nothing to push away from. ``positive=0`` is the paper's NSR.
    """
    return Algorithm(
        name="w_reinforce",
        advantage=use(advantage.discounted_returns),
        normalization=use(advantage.positive_negative, positive=positive),
        policy_loss=use(losses.reinforce),
    )


def asymre(*, shift: float = -0.1) -> Algorithm:
    """AsymRE (arXiv:2506.20520): REINFORCE with a baseline below the group's mean, for responses that are stale."""
    return Algorithm(
        name="asymre",
        group_size=8,
        advantage=use(advantage.grpo, normalize_std=False),
        policy_loss=use(losses.asymre, shift=shift),
        aggregation=use(losses.seq_mean_token_sum),
    )
