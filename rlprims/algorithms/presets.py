"""Algorithms by their papers. Each is an :class:`Algorithm`; ``.replace(...)`` changes it.

What a paper leaves open, or a run decides (group size, learning rate), is a parameter or a field.
"""

from rlprims import advantage, losses, rewards
from rlprims.algorithms._algorithm import Algorithm, GroupFilter, LossTerm
from rlprims.algorithms._use import use


def _kl_term(kl_coef: float) -> tuple[LossTerm, ...]:
    return (LossTerm(coefficient=kl_coef, loss=use(losses.kl)),) if kl_coef else ()


def reinforce() -> Algorithm:
    """REINFORCE (Williams 1992): the return times the score function, with no baseline.

    With a reward of 0 or 1 it trains on right answers only; shift the reward and it becomes another algorithm, which
    is what baselines are for.
    """
    return Algorithm(name="reinforce", advantage=use(advantage.discounted_returns), policy_loss=use(losses.reinforce))


def ppo(*, lam: float = 0.95) -> Algorithm:
    """PPO with a critic (Schulman et al. 2017, arXiv:1707.06347; for language models Ouyang et al. 2022).

    Advantages by GAE, whitened over the batch; the clipped surrogate with ε = 0.2 and the clipped value loss. γ is 1,
    as the reward comes at the end. For RLHF add ``kl_in_reward``.
    """
    return Algorithm(
        name="ppo",
        advantage=use(advantage.gae, gamma=1.0, lam=lam),
        normalization=use(advantage.whiten),
        policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.2),
        value_loss=use(losses.value, clip=0.2),
    )


def grpo(*, kl_coef: float = 0.04) -> Algorithm:
    """GRPO (Shao et al. 2024, arXiv:2402.03300): the group is the baseline; z-scores, KL in the loss.

    The paper's G is 64 and its KL is k3 with coefficient 0.04, eqs. 3 and 4. ``kl_coef=0`` needs no reference model.
    """
    return Algorithm(
        name="grpo",
        group_size=64,
        advantage=use(advantage.grpo),
        policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.2),
        loss_terms=_kl_term(kl_coef),
        aggregation=use(losses.seq_mean_token_mean),
    )


def dr_grpo(*, max_length: int = 3000) -> Algorithm:
    """Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): GRPO without its two biases.

    No division by the group's std, which favours questions that are too easy or too hard, and no division by the
    response's length, which favours long wrong answers: the sum is divided by the constant ``max_length``, the
    generation budget (3000 in the paper).
    """
    return Algorithm(
        name="dr_grpo",
        group_size=8,
        advantage=use(advantage.grpo, normalize_std=False),
        policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.2),
        aggregation=use(losses.seq_mean_token_sum_norm, length=max_length),
    )


def dapo(*, max_length: int = 20480, buffer_length: int = 4096, metric: str = "acc") -> Algorithm:
    """DAPO (Yu et al. 2025, arXiv:2503.14476): clip-higher, dynamic sampling, token-level loss, overlong punishment.

    Groups whose accuracy does not differ are replaced by new samples; the loss is a mean over tokens as in the authors'
    code (the paper's eq. 8, a mean per prompt, is ``losses.prompt_token_mean``); responses that end within
    ``buffer_length`` of ``max_length`` lose up to 1. No KL. The filter looks at the accuracy and never at the score
    that holds the penalty.
    """
    return Algorithm(
        name="dapo",
        group_size=16,
        filter=GroupFilter(metric=metric),
        score_shaping=(use(rewards.overlong_penalty, max_length=max_length, buffer_length=buffer_length),),
        advantage=use(advantage.grpo),
        policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.28),
    )


def rloo() -> Algorithm:
    """RLOO (Ahmadian et al. 2024, arXiv:2402.14740): REINFORCE; the mean of a prompt's other samples is the baseline.

    The paper's objective is neither clipped nor divided by length. For RLHF add ``kl_in_reward``.
    """
    return Algorithm(
        name="rloo",
        group_size=4,
        advantage=use(advantage.rloo),
        policy_loss=use(losses.reinforce),
        aggregation=use(losses.seq_mean_token_sum),
    )


def remax() -> Algorithm:
    """ReMax (Li et al. 2023, arXiv:2310.10505): REINFORCE; the score of the greedy response is the baseline.

    One more generation per prompt, and no critic. For RLHF add ``kl_in_reward``.
    """
    return Algorithm(
        name="remax",
        advantage=use(advantage.remax),
        policy_loss=use(losses.reinforce),
        aggregation=use(losses.seq_mean_token_sum),
    )


def gspo() -> Algorithm:
    """GSPO (Zheng et al. 2025, arXiv:2507.18071): GRPO with one ratio per response, clipped as a whole.

    The ratio is the geometric mean of the tokens', so its bounds are a thousand times tighter: 3e-4 and 4e-4. Every
    response weighs the same.
    """
    return Algorithm(
        name="gspo",
        group_size=16,
        advantage=use(advantage.grpo),
        policy_loss=use(losses.gspo),
        aggregation=use(losses.seq_mean_token_mean),
    )


def cispo() -> Algorithm:
    """CISPO (MiniMax-M1, arXiv:2506.13585): clip the importance weight and not the update.

    Every token keeps its gradient, weighted by its ratio bounded above by ``w_max``; advantages are GRPO's, the loss a
    mean over tokens.
    """
    return Algorithm(name="cispo", group_size=16, advantage=use(advantage.grpo), policy_loss=use(losses.cispo))


def gmpo() -> Algorithm:
    """GMPO (Zhao et al. 2025, arXiv:2507.20673): maximize the geometric mean of the token ratios, clipped by token.

    Less moved by a single token's ratio than GRPO's arithmetic mean, so the bounds can be wide: ±0.4 in the log-ratio.
    """
    return Algorithm(
        name="gmpo",
        group_size=8,
        advantage=use(advantage.grpo),
        policy_loss=use(losses.gmpo),
        aggregation=use(losses.seq_mean_token_mean),
    )


def sapo() -> Algorithm:
    """SAPO (Gao et al. 2025, arXiv:2511.20347): a smooth gate in the place of the clip.

    The weight of a token falls off with the distance of its ratio from 1, faster where the advantage is negative.
    """
    return Algorithm(
        name="sapo",
        group_size=8,
        advantage=use(advantage.grpo),
        policy_loss=use(losses.sapo),
        aggregation=use(losses.seq_mean_token_mean),
    )


def reinforce_pp() -> Algorithm:
    """REINFORCE++ (Hu 2025, arXiv:2501.03262): no critic and no group; the whole batch is the baseline.

    Returns, whitened over the batch, under the clipped surrogate. For RLHF add ``kl_in_reward`` with k1.
    """
    return Algorithm(name="reinforce_pp", advantage=use(advantage.reinforce_pp))


def reinforce_pp_baseline() -> Algorithm:
    """REINFORCE++-baseline (Hu 2025, arXiv:2501.03262): the group's mean is taken away, the batch's std divides."""
    return Algorithm(name="reinforce_pp_baseline", group_size=8, advantage=use(advantage.reinforce_pp_baseline))


def opo() -> Algorithm:
    """OPO (Hao et al. 2025, arXiv:2505.23585): exactly on policy, with the length-weighted optimal baseline."""
    return Algorithm(
        name="opo",
        group_size=8,
        advantage=use(advantage.opo),
        policy_loss=use(losses.reinforce),
        aggregation=use(losses.seq_mean_token_sum),
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
