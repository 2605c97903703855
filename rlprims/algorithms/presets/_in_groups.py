"""Presets whose loss compares the responses of a group. Their micro-batches have whole groups."""

from rlprims import advantage, losses
from rlprims.algorithms._algorithm import Algorithm
from rlprims.algorithms._use import use


def gvpo(*, beta: float = 0.1) -> Algorithm:
    """GVPO (Zhang et al. 2025, arXiv:2504.19599): fits the differences of β · log-ratios in a group to its rewards.

    It is a squared error. Its minimum is the optimum of the reward minus β times the KL to the policy at the start of
    the step. There is no clip and no ratio, so the responses may come from any policy.
    """
    return Algorithm(
        name="gvpo",
        group_size=4,
        advantage=use(advantage.grpo, normalize_std=False),
        policy_loss=use(losses.gvpo, beta=beta),
        aggregation=losses.seq_mean_token_mean,
    )


def real(*, tau: float = 0.5) -> Algorithm:
    """REAL (Zhai et al. 2026, arXiv:2602.05630): log-ratios classify the responses of a group, with rewards as labels.

    The gradient of a good response becomes smaller when it becomes more likely, and that of a bad response when it
    becomes less likely. The weight of a response is at most 1/τ.
    """
    return Algorithm(
        name="real",
        group_size=8,
        advantage=use(advantage.grpo, normalize_std=False),
        policy_loss=use(losses.real, tau=tau),
        aggregation=losses.prompt_token_mean,
    )


def flowrl(*, beta: float = 15.0) -> Algorithm:
    """FlowRL (Zhu et al. 2025, arXiv:2509.15207): fits the policy to a distribution over all rewards.

    The target is the reference policy times exp(β · GRPO's advantage). The normalizer is computed for each group; in
    the paper a head on the prompt learns it.
    """
    return Algorithm(
        name="flowrl",
        group_size=8,
        advantage=advantage.grpo,
        policy_loss=use(losses.flowrl, beta=beta),
        aggregation=losses.seq_mean_token_mean,
    )


def online_dpo(*, beta: float = 0.1) -> Algorithm:
    """Online DPO (Guo et al. 2024, arXiv:2402.04792): DPO on the best and the worst response of each group.

    A group of equal scores has no pair and loss 0. A filter of groups can drop it instead.
    """
    return Algorithm(
        name="online_dpo",
        group_size=8,
        advantage=use(advantage.grpo, normalize_std=False),
        policy_loss=use(losses.online_dpo, beta=beta),
        aggregation=losses.prompt_token_mean,
    )
