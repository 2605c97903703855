"""Presets whose baseline is the group, under the clipped surrogate."""

from rlprims import advantage, losses, rewards
from rlprims.algorithms._algorithm import Algorithm, GroupFilter, LossTerm
from rlprims.algorithms._use import use
from rlprims.algorithms.presets._dialects import Dialect, in_dialect


def grpo(*, kl_coef: float = 0.04, dialect: Dialect | None = None) -> Algorithm:
    """GRPO (Shao et al. 2024, arXiv:2402.03300): the group is the baseline; z-scores, KL in the loss.

    The paper's G is 64 and its KL is k3 with coefficient 0.04, eqs. 3 and 4. ``kl_coef=0`` needs no reference model.
    """
    # TRL weighs its KL by the ratio, from 1.16 on.
    kl = use(losses.weighted_kl if dialect == "trl-1.16" else losses.kl)
    return in_dialect(
        Algorithm(
            name="grpo",
            group_size=64,
            advantage=use(advantage.grpo),
            policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.2),
            loss_terms=(LossTerm(coefficient=kl_coef, loss=kl),) if kl_coef else (),
            aggregation=use(losses.seq_mean_token_mean),
        ),
        dialect,
    )


def dr_grpo(*, max_length: int = 3000, dialect: Dialect | None = None) -> Algorithm:
    """Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): GRPO without its two biases.

    No division by the group's std, which favours questions that are too easy or too hard, and no division by the
    response's length, which favours long wrong answers: the sum is divided by the constant ``max_length``, the
    generation budget (3000 in the paper).
    """
    return in_dialect(
        Algorithm(
            name="dr_grpo",
            group_size=8,
            advantage=use(advantage.grpo, normalize_std=False),
            policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.2),
            aggregation=use(losses.seq_mean_token_sum_norm, length=max_length),
        ),
        dialect,
    )


def dapo(
    *, max_length: int = 20480, buffer_length: int = 4096, metric: str = "acc", dialect: Dialect | None = None
) -> Algorithm:
    """DAPO (Yu et al. 2025, arXiv:2503.14476): clip-higher, dynamic sampling, token-level loss, overlong punishment.

    Groups whose accuracy does not differ are replaced by new samples; the loss is a mean over tokens as in the authors'
    code (the paper's eq. 8, a mean per prompt, is ``losses.prompt_token_mean``); responses that end within
    ``buffer_length`` of ``max_length`` lose up to 1. No KL. The filter looks at the accuracy and never at the score
    that holds the penalty.
    """
    return in_dialect(
        Algorithm(
            name="dapo",
            group_size=16,
            filter=GroupFilter(metric=metric),
            score_shaping=(use(rewards.overlong_penalty, max_length=max_length, buffer_length=buffer_length),),
            advantage=use(advantage.grpo),
            policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.28),
        ),
        dialect,
    )


def lite_ppo(*, dialect: Dialect | None = None) -> Algorithm:
    """LitePPO (arXiv:2508.08221): GRPO whose std is the batch's, and whose loss is a mean over tokens.

    The group is centred, so easy and hard prompts are alike; the batch's deviation does not blow up the groups that
    nearly agree.
    """
    return in_dialect(
        Algorithm(
            name="lite_ppo",
            group_size=8,
            advantage=use(advantage.grpo, std_over="batch"),
            policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.2),
        ),
        dialect,
    )


def pass_at_k(*, dialect: Dialect | None = None) -> Algorithm:
    """GRPO that trains the best of a group (arXiv:2503.19595): only the best sample learns, by its lead."""
    return in_dialect(
        Algorithm(name="pass_at_k", group_size=8, advantage=use(advantage.pass_at_k)),
        dialect,
    )


def quantile() -> Algorithm:
    """QAE (arXiv:2509.22611): a quantile of the group, and not its mean, is the baseline; the rest is DAPO's clip.

    On hard prompts only rare successes learn, on easy ones only rare failures.
    """
    return Algorithm(
        name="quantile",
        group_size=16,
        advantage=use(advantage.quantile),
        policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.28),
    )


def bnpo() -> Algorithm:
    """BNPO (Xiao et al. 2025, arXiv:2506.02864): centred rewards over the density of the prompts' pass rates.

    The density is a Beta distribution's, fitted to the batch, so that the normalization follows what the policy has
    learnt. The rewards are 0 or 1. What TRL calls bnpo is a mean over the tokens of a micro-batch.
    """
    return Algorithm(name="bnpo", group_size=16, advantage=use(advantage.beta_normalized))


def gdpo(
    *,
    components: tuple[str, ...] = ("correct", "format"),
    weights: tuple[float, ...] | None = None,
    dialect: Dialect | None = None,
) -> Algorithm:
    """GDPO (arXiv:2601.05242): several rewards, each normalized within the group before they are summed.

    ``components`` are columns that the verifier returns beside its score. A filter must look at every one of them,
    ``filter={"keep": filters.varied_components}``: groups with equal sums may still have advantages.
    """
    return in_dialect(
        Algorithm(
            name="gdpo",
            group_size=8,
            components=components,
            advantage=use(advantage.gdpo, weights=weights),
            aggregation=use(losses.seq_mean_token_mean),
        ),
        dialect,
    )
