"""Presets whose loss compares the responses of a group with each other: micro-batches hold whole groups."""

from rlprims import advantage, losses
from rlprims.algorithms._algorithm import Algorithm
from rlprims.algorithms._use import use


def gvpo(*, beta: float = 0.1) -> Algorithm:
    """GVPO (Zhang et al. 2025, arXiv:2504.19599): log-ratios differ within a group as its rewards do, divided by β.

    A squared error whose minimum is the optimum of the reward less β times the KL to the policy at the start of the
    step. No clip and no ratio, so responses may be of any sampler.
    """
    return Algorithm(
        name="gvpo",
        group_size=4,
        advantage=use(advantage.grpo, normalize_std=False),
        policy_loss=use(losses.gvpo, beta=beta),
        aggregation=use(losses.seq_mean_token_mean),
    )


def real(*, tau: float = 0.5) -> Algorithm:
    """REAL (Zhai et al. 2026, arXiv:2602.05630): rewards are labels, and a group is classified by its log-ratios.

    A good response pulls less as it gets likelier and a bad one pushes less as it gets rarer, both by at most 1/τ.
    """
    return Algorithm(
        name="real",
        group_size=8,
        advantage=use(advantage.grpo, normalize_std=False),
        policy_loss=use(losses.real, tau=tau),
        aggregation=use(losses.prompt_token_mean),
    )


def flowrl(*, beta: float = 15.0) -> Algorithm:
    """FlowRL (Zhu et al. 2025, arXiv:2509.15207): every response as likely as its reward says, not the best alone.

    Responses are to be as likely as the reference's, tilted by β times GRPO's advantage. The normalizer is each group's
    own, where the paper learns one with a head on the prompt.
    """
    return Algorithm(
        name="flowrl",
        group_size=8,
        advantage=use(advantage.grpo),
        policy_loss=use(losses.flowrl, beta=beta),
        aggregation=use(losses.seq_mean_token_mean),
    )


def online_dpo(*, beta: float = 0.1) -> Algorithm:
    """Online DPO (Guo et al. 2024, arXiv:2402.04792): DPO on the best and the worst response of each group.

    A group whose responses have equal scores has no pair and a loss of 0. Use a filter of groups to drop it instead.
    """
    return Algorithm(
        name="online_dpo",
        group_size=8,
        advantage=use(advantage.grpo, normalize_std=False),
        policy_loss=use(losses.online_dpo, beta=beta),
        aggregation=use(losses.prompt_token_mean),
    )
