"""Presets that differ from GRPO in what they make of the ratio."""

from rlprims import advantage, losses
from rlprims.algorithms._algorithm import Algorithm
from rlprims.algorithms._use import use
from rlprims.algorithms.presets._dialects import Dialect, in_dialect


def gspo(*, dialect: Dialect | None = None) -> Algorithm:
    """GSPO (Zheng et al. 2025, arXiv:2507.18071): GRPO with one ratio per response, clipped as a whole.

    The ratio is the geometric mean of the tokens', so its bounds are a thousand times tighter: 3e-4 and 4e-4. Every
    response weighs the same.
    """
    return in_dialect(
        Algorithm(
            name="gspo",
            group_size=16,
            advantage=use(advantage.grpo),
            policy_loss=use(losses.gspo),
            aggregation=use(losses.seq_mean_token_mean),
        ),
        dialect,
    )


def cispo(*, dialect: Dialect | None = None) -> Algorithm:
    """CISPO (MiniMax-M1, arXiv:2506.13585): clip the importance weight and not the update.

    Every token keeps its gradient, weighted by its ratio bounded above by ``w_max``; advantages are GRPO's, the loss a
    mean over tokens.
    """
    return in_dialect(
        Algorithm(name="cispo", group_size=16, advantage=use(advantage.grpo), policy_loss=use(losses.cispo)),
        dialect,
    )


def gmpo(*, dialect: Dialect | None = None) -> Algorithm:
    """GMPO (Zhao et al. 2025, arXiv:2507.20673): maximize the geometric mean of the token ratios, clipped by token.

    Less moved by a single token's ratio than GRPO's arithmetic mean, so the bounds can be wide: ±0.4 in the log-ratio.
    """
    return in_dialect(
        Algorithm(
            name="gmpo",
            group_size=8,
            advantage=use(advantage.grpo),
            policy_loss=use(losses.gmpo),
            aggregation=use(losses.seq_mean_token_mean),
        ),
        dialect,
    )


def sapo(*, dialect: Dialect | None = None) -> Algorithm:
    """SAPO (Gao et al. 2025, arXiv:2511.20347): a smooth gate in the place of the clip.

    The weight of a token falls off with the distance of its ratio from 1, faster where the advantage is negative.
    """
    return in_dialect(
        Algorithm(
            name="sapo",
            group_size=8,
            advantage=use(advantage.grpo),
            policy_loss=use(losses.sapo),
            aggregation=use(losses.seq_mean_token_mean),
        ),
        dialect,
    )


def luspo(*, dialect: Dialect | None = None) -> Algorithm:
    """LUSPO (arXiv:2602.05261): GSPO whose responses weigh as much as they are long."""
    return in_dialect(
        Algorithm(
            name="luspo",
            group_size=16,
            advantage=use(advantage.grpo),
            policy_loss=use(losses.gspo),
            aggregation=use(losses.seq_mean_token_sum),
        ),
        dialect,
    )


def dppo(*, dialect: Dialect | None = None) -> Algorithm:
    """DPPO (arXiv:2602.04879): the clip's place is taken by a bound on how far a token's probability has moved.

    The ratio is to the policy that sampled, so the sampler's gap is corrected with it.
    """
    return in_dialect(
        Algorithm(name="dppo", group_size=16, advantage=use(advantage.grpo), policy_loss=use(losses.dppo)),
        dialect,
    )


def topr() -> Algorithm:
    """TOPR (arXiv:2503.14286): good responses are imitated as they are, bad ones by their ratio of at most 1."""
    return Algorithm(
        name="topr",
        group_size=16,
        advantage=use(advantage.grpo, normalize_std=False),
        policy_loss=use(losses.topr),
        aggregation=use(losses.seq_mean_token_sum),
    )


def opmd(*, tau: float = 0.1) -> Algorithm:
    """Online mirror descent of Kimi k1.5 (arXiv:2501.12599): a squared log-ratio holds the policy, and no clip."""
    return Algorithm(
        name="opmd",
        group_size=8,
        advantage=use(advantage.grpo, normalize_std=False),
        policy_loss=use(losses.opmd, tau=tau),
        aggregation=use(losses.seq_mean_token_sum),
    )


def vespo() -> Algorithm:
    """VESPO (arXiv:2602.10693): a response's ratio weighs it through a soft kernel that vanishes far from 1."""
    return Algorithm(name="vespo", group_size=8, advantage=use(advantage.grpo), policy_loss=use(losses.vespo))


def gppo() -> Algorithm:
    """GPPO (arXiv:2508.07629): PPO's clip, and a clipped token keeps the gradient that it had on the bound."""
    return Algorithm(name="gppo", group_size=8, advantage=use(advantage.grpo), policy_loss=use(losses.gppo))


def aspo(*, w_max: float | None = None) -> Algorithm:
    """ASPO (Wang et al. 2025, arXiv:2510.06062): good tokens weigh by the ratio upside down, bad ones as in PPO.

    A good token that has become likely counts for less and one that was left behind for more. ``w_max`` is the paper's
    soft dual clip, for which it gives no number.
    """
    return Algorithm(
        name="aspo", group_size=16, advantage=use(advantage.grpo), policy_loss=use(losses.aspo, w_max=w_max)
    )


def decoupled_ppo(*, w_max: float | None = None, dialect: Dialect | None = None) -> Algorithm:
    """Decoupled PPO (arXiv:2110.00641; for language models AReaL, arXiv:2505.24298), of three policies.

    The clip is around the policy at the start of the step; a weight accounts for the older one that sampled.
    """
    return in_dialect(
        Algorithm(
            name="decoupled_ppo",
            group_size=16,
            advantage=use(advantage.grpo),
            policy_loss=use(losses.decoupled_ppo, w_max=w_max),
        ),
        dialect,
    )
