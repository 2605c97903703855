"""Presets with a critic, or with the batch as the baseline."""

from rlprims import advantage, losses
from rlprims.algorithms._adapters import is_correct
from rlprims.algorithms._algorithm import Algorithm, LossTerm
from rlprims.algorithms._use import use
from rlprims.algorithms.presets._dialects import Dialect, in_dialect


def ppo(*, lam: float = 0.95, dialect: Dialect | None = None) -> Algorithm:
    """PPO with a critic (Schulman et al. 2017, arXiv:1707.06347; for language models Ouyang et al. 2022).

    Advantages by GAE, whitened over the batch; the clipped surrogate with ε = 0.2 and the clipped value loss. γ is 1,
    as the reward comes at the end. For RLHF add ``kl_in_reward``.
    """
    return in_dialect(
        Algorithm(
            name="ppo",
            advantage=use(advantage.gae, gamma=1.0, lam=lam),
            normalization=use(advantage.whiten),
            policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.2),
            value_loss=use(losses.value, clip=0.2),
        ),
        dialect,
    )


def vapo(*, alpha: float = 0.05, imitation: float = 0.1, dialect: Dialect | None = None) -> Algorithm:
    """VAPO (Yue et al. 2025, arXiv:2504.05118): PPO with a critic that copes with long responses.

    The policy's λ is 1 − 1/(α·length), the critic's is 1; the clip is 0.2 and 0.28, the loss a mean over tokens, and 16
    samples of a prompt are taken although none are compared. ``imitation`` weighs the negative log-likelihood of the
    responses with a positive score, a mean over their tokens, however few they are. The critic's pretraining is a
    setting of the run, ``critic.warmup_steps``.
    """
    imitated = LossTerm(coefficient=imitation, loss=use(losses.nll), tokens=use(is_correct), over="term")
    return in_dialect(
        Algorithm(
            name="vapo",
            group_size=16,
            advantage=use(advantage.length_adaptive_gae, alpha=alpha),
            normalization=use(advantage.whiten),
            policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.28),
            loss_terms=(imitated,) if imitation else (),
            value_target=use(advantage.td_lambda, lam=1.0),
            value_loss=use(losses.value),
        ),
        dialect,
    )


def reinforce_pp(*, dialect: Dialect | None = None) -> Algorithm:
    """REINFORCE++ (Hu 2025, arXiv:2501.03262): no critic and no group; the whole batch is the baseline.

    Returns, whitened over the batch, under the clipped surrogate. For RLHF add ``kl_in_reward`` with k1.
    """
    return in_dialect(
        Algorithm(name="reinforce_pp", advantage=use(advantage.reinforce_pp)),
        dialect,
    )


def reinforce_pp_baseline(*, dialect: Dialect | None = None) -> Algorithm:
    """REINFORCE++-baseline (Hu 2025, arXiv:2501.03262): the group's mean is taken away, the batch's std divides."""
    return in_dialect(
        Algorithm(name="reinforce_pp_baseline", group_size=8, advantage=use(advantage.reinforce_pp_baseline)),
        dialect,
    )
