"""Presets that differ from GRPO in the use of the ratio."""

from rlprims import advantage, losses
from rlprims.algorithms._algorithm import Algorithm
from rlprims.algorithms._use import use
from rlprims.algorithms.presets._dialects import Dialect, in_dialects
from rlprims.algorithms.presets._group import grpo


@in_dialects
def gspo(*, dialect: Dialect | None = None) -> Algorithm:
    """GSPO (Zheng et al. 2025, arXiv:2507.18071): GRPO with one clipped ratio per response.

    The ratio is the geometric mean over tokens, so its bounds are tight: 3e-4 and 4e-4. All responses weigh the same.
    """
    return grpo(kl_coef=0.0).replace(name="gspo", group_size=16, policy_loss=losses.gspo)


@in_dialects
def cispo(*, dialect: Dialect | None = None) -> Algorithm:
    """CISPO (MiniMax-M1, arXiv:2506.13585): REINFORCE with clipped importance weights.

    Every token has a gradient, times its ratio, at most ``w_max``. Advantages are GRPO's; the mean is over tokens.
    """
    return Algorithm(name="cispo", group_size=16, advantage=advantage.grpo, policy_loss=losses.cispo)


@in_dialects
def gmpo(*, dialect: Dialect | None = None) -> Algorithm:
    """GMPO (Zhao et al. 2025, arXiv:2507.20673): maximizes the geometric mean of the clipped token ratios.

    A single ratio changes it less than GRPO's arithmetic mean, so the bounds can be wide: ±0.4 in the log-ratio.
    """
    return grpo(kl_coef=0.0).replace(name="gmpo", group_size=8, policy_loss=losses.gmpo)


@in_dialects
def sapo(*, dialect: Dialect | None = None) -> Algorithm:
    """SAPO (Gao et al. 2025, arXiv:2511.20347): a smooth gate instead of the clip.

    The weight of a token falls with the distance of its ratio from 1, faster if the advantage is negative.
    """
    return grpo(kl_coef=0.0).replace(name="sapo", group_size=8, policy_loss=losses.sapo)


@in_dialects
def luspo(*, dialect: Dialect | None = None) -> Algorithm:
    """LUSPO (arXiv:2602.05261): GSPO in which the weight of a response is its length."""
    return gspo().replace(name="luspo", aggregation=losses.seq_mean_token_sum)


@in_dialects
def dppo(*, dialect: Dialect | None = None) -> Algorithm:
    """DPPO (arXiv:2602.04879): a bound on the change of a token's probability instead of the clip.

    The ratio is to the policy that sampled, so it also corrects the gap between sampler and trainer.
    """
    return Algorithm(name="dppo", group_size=16, advantage=advantage.grpo, policy_loss=losses.dppo)


def topr() -> Algorithm:
    """TOPR (arXiv:2503.14286): good responses have weight 1, bad ones the weight of their ratio, at most 1."""
    return Algorithm(
        name="topr",
        group_size=16,
        advantage=use(advantage.grpo, normalize_std=False),
        policy_loss=losses.topr,
        aggregation=losses.seq_mean_token_sum,
    )


def opmd(*, tau: float = 0.1) -> Algorithm:
    """Online mirror descent of Kimi k1.5 (arXiv:2501.12599): REINFORCE plus a squared log-ratio, without a clip."""
    return Algorithm(
        name="opmd",
        group_size=8,
        advantage=use(advantage.grpo, normalize_std=False),
        policy_loss=use(losses.opmd, tau=tau),
        aggregation=losses.seq_mean_token_sum,
    )


def vespo() -> Algorithm:
    """VESPO (arXiv:2602.10693): the weight of a response is a smooth function of its ratio that vanishes far from 1."""
    return Algorithm(name="vespo", group_size=8, advantage=advantage.grpo, policy_loss=losses.vespo)


def gppo() -> Algorithm:
    """GPPO (arXiv:2508.07629): PPO's clip, but a clipped token has the gradient of the bound."""
    return Algorithm(name="gppo", group_size=8, advantage=advantage.grpo, policy_loss=losses.gppo)


def aspo(*, w_max: float | None = None) -> Algorithm:
    """ASPO (Wang et al. 2025, arXiv:2510.06062): good tokens have the inverse ratio as weight, bad ones the ratio.

    ``w_max`` is the paper's soft dual clip, for which it gives no number.
    """
    return Algorithm(name="aspo", group_size=16, advantage=advantage.grpo, policy_loss=use(losses.aspo, w_max=w_max))


@in_dialects
def decoupled_ppo(*, w_max: float | None = None, dialect: Dialect | None = None) -> Algorithm:
    """Decoupled PPO (arXiv:2110.00641; for language models AReaL, arXiv:2505.24298), with three policies.

    The clip is around the policy at the start of the step. A weight corrects for the older policy that sampled.
    """
    loss = use(losses.decoupled_ppo, w_max=w_max)
    return Algorithm(name="decoupled_ppo", group_size=16, advantage=advantage.grpo, policy_loss=loss)
