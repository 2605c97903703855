"""Presets with a group baseline and the clipped surrogate."""

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
    return Algorithm(
        name="dr_grpo",
        group_size=8,
        advantage=use(advantage.grpo, normalize_std=False),
        policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.2),
        aggregation=use(losses.seq_mean_token_sum_norm, length=max_length),
    )


@in_dialects
def dapo(
    *, max_length: int = 20480, buffer_length: int = 4096, metric: str = "acc", dialect: Dialect | None = None
) -> Algorithm:
    """DAPO (Yu et al. 2025, arXiv:2503.14476): clip-higher, dynamic sampling, token-level loss, overlong punishment.

    Groups of equal accuracies are replaced by new samples. The loss is a mean over tokens, as in the authors' code (the
    paper's eq. 8, a mean per prompt, is ``losses.prompt_token_mean``). The score of a response falls by up to 1 in the
    last ``buffer_length`` tokens before ``max_length``. There is no KL. The filter uses the accuracy, which does not
    include the penalty.
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

    Rewards are centred per group. The std of the batch does not enlarge the small differences of nearly constant
    groups.
    """
    return Algorithm(
        name="lite_ppo",
        group_size=8,
        advantage=use(advantage.grpo, std_over="batch"),
        policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.2),
    )


@in_dialects
def pass_at_k(*, dialect: Dialect | None = None) -> Algorithm:
    """GRPO for the best of a group (arXiv:2503.19595): only the best sample has an advantage, its difference to the
    second best."""
    return Algorithm(name="pass_at_k", group_size=8, advantage=advantage.pass_at_k)


def quantile() -> Algorithm:
    """QAE (arXiv:2509.22611): a quantile of the group as the baseline, with DAPO's clip.

    On hard prompts only the rare correct responses have an advantage, on easy prompts only the rare wrong ones.
    """
    return Algorithm(
        name="quantile",
        group_size=16,
        advantage=advantage.quantile,
        policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.28),
    )


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
    return Algorithm(
        name="gdpo",
        group_size=8,
        components=components,
        advantage=use(advantage.gdpo, weights=weights),
        aggregation=losses.seq_mean_token_mean,
    )
