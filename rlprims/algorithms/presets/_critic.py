"""Presets with a critic, or with the mean of the batch as the baseline."""

from rlprims import advantage, losses
from rlprims.algorithms._adapters import is_correct
from rlprims.algorithms._algorithm import Algorithm, LossTerm
from rlprims.algorithms._use import use
from rlprims.algorithms.presets._dialects import Dialect, in_dialects


@in_dialects
def ppo(*, lam: float = 0.95, dialect: Dialect | None = None) -> Algorithm:
    """PPO with a critic (Schulman et al. 2017, arXiv:1707.06347; for language models Ouyang et al. 2022).

    GAE advantages, whitened over the batch; the clipped surrogate with ε = 0.2 and the clipped value loss. γ is 1,
    because the reward is at the end. For RLHF add ``kl_in_reward``.
    """
    return Algorithm(
        name="ppo",
        advantage=use(advantage.gae, gamma=1.0, lam=lam),
        normalization=advantage.whiten,
        policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.2),
        value_loss=use(losses.value, clip=0.2),
    )


@in_dialects
def vapo(*, alpha: float = 0.05, imitation: float = 0.1, dialect: Dialect | None = None) -> Algorithm:
    """VAPO (Yue et al. 2025, arXiv:2504.05118): PPO with a critic for long responses.

    The policy's λ is 1 − 1/(α·length), the critic's is 1. The clip is 0.2 and 0.28, the loss is a mean over tokens, and
    there are 16 samples per prompt, although they are not compared. ``imitation`` is the coefficient of the negative
    log-likelihood of the responses with a positive score, a mean over their tokens. The critic's pretraining is a
    setting of the run, ``critic.warmup_steps``.
    """
    imitated = LossTerm(coefficient=imitation, loss=losses.nll, tokens=is_correct, over="term")
    return Algorithm(
        name="vapo",
        group_size=16,
        advantage=use(advantage.length_adaptive_gae, alpha=alpha),
        normalization=advantage.whiten,
        policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.28),
        loss_terms=(imitated,) if imitation else (),
        value_target=use(advantage.td_lambda, lam=1.0),
        value_loss=losses.value,
    )


@in_dialects
def reinforce_pp(*, dialect: Dialect | None = None) -> Algorithm:
    """REINFORCE++ (Hu 2025, arXiv:2501.03262): returns whitened over the batch, without a critic or groups.

    The loss is the clipped surrogate. For RLHF add ``kl_in_reward`` with k1.
    """
    return Algorithm(name="reinforce_pp", advantage=advantage.reinforce_pp)


@in_dialects
def reinforce_pp_baseline(*, dialect: Dialect | None = None) -> Algorithm:
    """REINFORCE++-baseline (Hu 2025, arXiv:2501.03262): minus the group's mean, divided by the batch's std."""
    return Algorithm(name="reinforce_pp_baseline", group_size=8, advantage=advantage.reinforce_pp_baseline)
