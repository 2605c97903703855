"""Presets with a group baseline and the clipped surrogate, or with a loss that compares the responses of a group."""

from rlprims import advantage, losses, rewards
from rlprims.algorithms._algorithm import Algorithm, GroupFilter, LossTerm
from rlprims.algorithms._use import use
from rlprims.algorithms.presets._dialects import Dialect, in_dialects


@in_dialects
def grpo(*, kl_coef: float = 0.04, dialect: Dialect | None = None) -> Algorithm:
    """GRPO (Shao et al. 2024, arXiv:2402.03300): z-scores over the group, and a KL in the loss.

    The paper's G is 64 and its KL is k3 with coefficient 0.04, eqs. 3 and 4. ``kl_coef=0`` needs no reference model.
    """
    # TRL multiplies its KL by the ratio, since 1.16.
    kl = use(losses.weighted_kl if dialect == "trl-1.16" else losses.kl)
    return Algorithm(
        name="grpo",
        group_size=64,
        advantage=advantage.grpo,
        policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.2),
        loss_terms=(LossTerm(coefficient=kl_coef, loss=kl),) if kl_coef else (),
        aggregation=losses.seq_mean_token_mean,
    )


@in_dialects
def dr_grpo(*, max_length: int = 3000, dialect: Dialect | None = None) -> Algorithm:
    """Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): GRPO without division by the std and by the length.

    Division by the group's std favours questions that are too easy or too hard; division by the response's length
    favours long wrong answers. Here the sum is divided by the constant ``max_length``, the maximum number of response
    tokens (3000 in the paper).
    """
    return grpo(kl_coef=0.0).replace(
        name="dr_grpo",
        group_size=8,
        advantage={"normalize_std": False},
        aggregation=use(losses.seq_mean_token_sum_norm, length=max_length),
    )


@in_dialects
def dapo(
    *, max_length: int = 20480, buffer_length: int = 4096, metric: str = "acc", dialect: Dialect | None = None
) -> Algorithm:
    """DAPO (Yu et al. 2025, arXiv:2503.14476): clip-higher, dynamic sampling, token-level loss, overlong punishment.

    Groups of equal accuracies are replaced by new samples; the accuracy does not include the penalty. The loss is a
    mean over tokens, as in the authors' code (the paper's eq. 8, a mean per prompt, is ``losses.prompt_token_mean``).
    The score of a response falls by up to 1 in the last ``buffer_length`` tokens before ``max_length``. There is no KL.
    """
    return Algorithm(
        name="dapo",
        group_size=16,
        filter=GroupFilter(metric=metric),
        score_shaping=(use(rewards.overlong_penalty, max_length=max_length, buffer_length=buffer_length),),
        advantage=advantage.grpo,
        policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.28),
    )


@in_dialects
def lite_ppo(*, dialect: Dialect | None = None) -> Algorithm:
    """LitePPO (arXiv:2508.08221): GRPO with the std of the batch and a mean over tokens.

    Rewards are centred per group. The std of the batch does not enlarge small differences of a group.
    """
    return Algorithm(name="lite_ppo", group_size=8, advantage=use(advantage.grpo, std_over="batch"))


@in_dialects
def pass_at_k_training(*, dialect: Dialect | None = None) -> Algorithm:
    """GRPO for the best of a group (arXiv:2503.19595): only the best sample has an advantage, its difference to the
    second best."""
    return Algorithm(name="pass_at_k_training", group_size=8, advantage=advantage.pass_at_k_training)


def quantile_baseline() -> Algorithm:
    """QAE (arXiv:2509.22611): a quantile of the group as the baseline, with DAPO's clip.

    On hard prompts only the rare correct responses have an advantage, on easy prompts only the rare wrong ones.
    """
    loss = use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.28)
    return Algorithm(name="quantile_baseline", group_size=16, advantage=advantage.quantile_baseline, policy_loss=loss)


def bnpo() -> Algorithm:
    """BNPO (Xiao et al. 2025, arXiv:2506.02864): centred rewards divided by the density of the prompts' pass rates.

    The density is that of a Beta distribution, fitted to each batch, so that the normalization adapts to the policy.
    The rewards are 0 or 1. TRL's bnpo is a mean over the tokens of a micro-batch and is not related.
    """
    return Algorithm(name="bnpo", group_size=16, advantage=advantage.beta_normalized)


@in_dialects
def gdpo(
    *,
    components: tuple[str, ...] = ("correct", "format"),
    weights: tuple[float, ...] | None = None,
    dialect: Dialect | None = None,
) -> Algorithm:
    """GDPO (arXiv:2601.05242): several rewards, each normalized within the group before they are summed.

    ``components`` are columns that the verifier returns in addition to its score. A filter must test all of them,
    ``filter={"keep": filters.varied_components}``, because groups with equal sums may still have advantages.
    """
    return grpo(kl_coef=0.0).replace(
        name="gdpo", group_size=8, components=components, advantage=use(advantage.gdpo, weights=weights)
    )


_CENTRED = grpo(kl_coef=0.0).replace(group_size=8, advantage={"normalize_std": False})
"""A mean per response of GRPO's advantages, which are not divided by the std."""


def gvpo(*, beta: float = 0.1) -> Algorithm:
    """GVPO (Zhang et al. 2025, arXiv:2504.19599): fits the differences of β · log-ratios in a group to its rewards.

    It is a squared error. Its minimum is the optimum of the reward minus β times the KL to the policy at the start of
    the step. There is no clip and no ratio, so the responses may come from any policy.
    """
    return _CENTRED.replace(name="gvpo", group_size=4, policy_loss=use(losses.gvpo, beta=beta))


def real(*, tau: float = 0.5) -> Algorithm:
    """REAL (Zhai et al. 2026, arXiv:2602.05630): log-ratios classify the responses of a group, with rewards as labels.

    The gradient shrinks as good responses become likely and bad ones unlikely. A response has a weight of at most 1/τ.
    """
    loss = use(losses.rewards_as_labels, tau=tau)
    return _CENTRED.replace(name="real", policy_loss=loss, aggregation=losses.prompt_token_mean)


def flowrl(*, beta: float = 15.0) -> Algorithm:
    """FlowRL (Zhu et al. 2025, arXiv:2509.15207): fits the policy to a distribution over all rewards.

    The target is π_ref exp(β · GRPO's advantage). The normalizer is per group; in the paper a head learns it.
    """
    return grpo(kl_coef=0.0).replace(name="flowrl", group_size=8, policy_loss=use(losses.flowrl, beta=beta))


def online_dpo(*, beta: float = 0.1) -> Algorithm:
    """Online DPO (Guo et al. 2024, arXiv:2402.04792): DPO on the best and the worst response of each group.

    A group of equal scores has no pair and loss 0. A filter of groups can drop it instead.
    """
    loss = use(losses.online_dpo, beta=beta)
    return _CENTRED.replace(name="online_dpo", policy_loss=loss, aggregation=losses.prompt_token_mean)
