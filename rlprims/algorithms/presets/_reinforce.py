"""Presets with the plain policy gradient, with a critic, or with the mean of the batch as the baseline."""

from rlprims import advantage, corrections, losses
from rlprims.algorithms._adapters import is_correct
from rlprims.algorithms._algorithm import Algorithm, LossTerm
from rlprims.algorithms._use import use
from rlprims.algorithms.presets._dialects import Dialect, in_dialects


def reinforce() -> Algorithm:
    """REINFORCE (Williams 1992): the return times the score function, with no baseline.

    With rewards of 0 and 1 it trains on correct answers only.
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
    return rloo().replace(name="opo", group_size=8, advantage=advantage.opo)


def maxrl() -> Algorithm:
    """MaxRL (Tajwar et al. 2026, arXiv:2602.02710): centred rewards divided by the group's mean reward.

    Hard prompts have more weight. Scores must be at least 0. For large groups the gradient is that of log P(correct).
    """
    return rloo().replace(name="maxrl", group_size=16, advantage=advantage.maxrl)


@in_dialects
def gpg(*, dialect: Dialect | None = None) -> Algorithm:
    """GPG (arXiv:2504.02546): REINFORCE with centred rewards, rescaled for groups of equal rewards."""
    return Algorithm(name="gpg", group_size=8, advantage=advantage.gpg, policy_loss=losses.reinforce)


def pkpo(*, k: int = 4) -> Algorithm:
    """PKPO (arXiv:2505.15201): the unbiased gradient of the best of k samples, from groups of more than k."""
    return rloo().replace(name="pkpo", group_size=16, advantage=use(advantage.pkpo, k=k))


def w_reinforce(*, positive: float = 0.1) -> Algorithm:
    """W-REINFORCE (arXiv:2506.01347): wrong answers have weight 1 and correct ones the weight ``positive``.

    The scores must be 1 and −1, because a wrong answer with score 0 has no gradient. ``positive=0`` is the paper's NSR.
    """
    return reinforce().replace(name="w_reinforce", normalization=use(advantage.weight_by_sign, positive=positive))


def asymre(*, shift: float = -0.1) -> Algorithm:
    """AsymRE (arXiv:2506.20520): REINFORCE with a baseline below the group's mean, for stale responses."""
    centred, loss = use(advantage.grpo, normalize_std=False), use(losses.asymre, shift=shift)
    return rloo().replace(name="asymre", group_size=8, advantage=centred, policy_loss=loss)


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
        value_loss=use(losses.value_loss, clip=0.2),
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
        value_loss=losses.value_loss,
    )


def sao(*, alpha: float = 1.5, clip_low: float = 0.3, clip_high: float = 5.0) -> Algorithm:
    """SAO (Hou et al. 2026, arXiv:2607.07508): one response per prompt, a critic, and a mask on the sampler's ratio.

    The loss is −ρ A log π with the ratio ρ to the sampler as a constant, 0 unless 1 − clip_low <= ρ <= 1 + clip_high.
    The bounds are those for reasoning; for code they are 0.8 and 3. The policy's λ is 1 − 1/(α·length), the critic's is
    1, and both skip tokens of the environment. The rest are settings of the run: ``critic.updates_per_policy_update:
    2``, ``freeze: [self_attn]`` and ``warmup_steps: 10``, and five times the policy's learning rate for the critic. The
    paper's text was not at hand: this is what twinkle and reef, which quote it, agree on; the token mean is twinkle's.
    """
    bounds = use(corrections.icepop, low=1 - clip_low, high=1 + clip_high)
    critic = {"group_size": 1, "normalization": None, "policy_loss": losses.reinforce}
    return vapo(alpha=alpha, imitation=0.0).replace(name="sao", corrections=(bounds,), **critic)


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
