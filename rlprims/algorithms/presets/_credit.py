"""Presets that tell the tokens of a response apart: by turn, by tree, by what followed, by a process reward."""

from rlprims import advantage, corrections, filters, losses
from rlprims.algorithms._algorithm import Algorithm, GroupFilter
from rlprims.algorithms._use import use
from rlprims.algorithms.presets._group import dapo


def turn_grpo() -> Algorithm:
    """MT-GRPO (Zeng et al. 2025, arXiv:2505.11821): GRPO of the outcome, and of each turn's own reward up to that turn.

    The batch has ``turn_ids`` and ``turn_rewards`` beside the outcome. As the authors' script: 21 samples, two updates
    of a batch, no KL, and a mean over tokens.
    """
    return Algorithm(
        name="turn_grpo",
        group_size=21,
        advantage=use(advantage.turn_grpo),
        policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.2),
        epochs=2,
    )


def tree_grpo() -> Algorithm:
    """Tree-GRPO (Ji et al. 2025, arXiv:2509.21240): leaves compared with those of their tree, and of their prompt.

    The batch has ``tree_ids``: which leaves branched off one beginning, at the border of a turn. How many trees and
    leaves there are is the sampler's choice; the group of 8 is a number of ours, and so is the mean by response.
    """
    return Algorithm(
        name="tree_grpo",
        group_size=8,
        advantage=use(advantage.tree),
        policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.2),
        aggregation=use(losses.seq_mean_token_mean),
    )


def fipo(*, max_length: int = 20480, buffer_length: int = 4096, metric: str = "acc") -> Algorithm:
    """FIPO (Ma et al. 2026, arXiv:2603.19835): DAPO whose tokens weigh by how the policy moved on what came after them.

    The weights are made before each update and are 1 before the first, so there are four updates of a batch, a number
    of ours. The dual clip is at 10, as in the authors' script for 32B, whose bound of the ratios it is too.
    """
    return dapo(max_length=max_length, buffer_length=buffer_length, metric=metric).replace(
        name="fipo",
        corrections=(use(corrections.fipo),),
        policy_loss={"dual_clip": 10.0},
        mini_batches=4,
    )


def prime(*, metric: str = "acc") -> Algorithm:
    """PRIME (Cui et al. 2025, arXiv:2502.01456): RLOO of the outcome and of implicit process rewards, whitened.

    The batch has ``process_rewards``, from ``rewards.implicit_process`` of a model that learns by
    ``losses.implicit_reward`` from the rollouts of each step. Prompts that a fifth to four fifths of the samples solve
    are trained on; 4 samples, no KL.
    """
    return Algorithm(
        name="prime",
        group_size=4,
        filter=GroupFilter(metric=metric, keep=use(filters.solve_rate, low=0.2, high=0.8)),
        advantage=use(advantage.prime),
        normalization=use(advantage.whiten),
        policy_loss=use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.2),
    )
