"""Presets with different credit for the tokens of a response: by turn, by tree, by later tokens, by process rewards."""

from rlprims import advantage, corrections, filters
from rlprims.algorithms._algorithm import Algorithm, GroupFilter
from rlprims.algorithms._use import use
from rlprims.algorithms.presets._group import dapo, grpo


def turn_grpo() -> Algorithm:
    """MT-GRPO (Zeng et al. 2025, arXiv:2505.11821): GRPO of the outcome plus advantages of the rewards of turns.

    The batch needs ``turn_ids`` and ``turn_rewards`` in addition to the outcome. As in the authors' script: 21 samples,
    two updates per batch, no KL, and a mean over tokens.
    """
    return Algorithm(name="turn_grpo", group_size=21, advantage=advantage.turn_grpo, epochs=2)


def tree_grpo() -> Algorithm:
    """Tree-GRPO (Ji et al. 2025, arXiv:2509.21240): leaves are compared inside their tree and inside their prompt.

    The batch needs ``tree_ids``: the leaves of a tree have a common prefix and branch at the end of a turn. The sampler
    determines the number of trees and leaves. The group size of 8 and the mean per response are our choices.
    """
    return grpo(kl_coef=0.0).replace(name="tree_grpo", group_size=8, advantage=advantage.tree_grpo)


def fipo(*, max_length: int = 20480, buffer_length: int = 4096, metric: str = "acc") -> Algorithm:
    """FIPO (Ma et al. 2026, arXiv:2603.19835): DAPO with token weights from the change of the policy on later tokens.

    The weights are computed before each update and are 1 before the first one, so there are four updates per batch (our
    choice). The dual clip is 10, as in the authors' script for 32B, where it is also the bound of the ratios.
    """
    return dapo(max_length=max_length, buffer_length=buffer_length, metric=metric).replace(
        name="fipo", corrections=(corrections.fipo,), policy_loss={"dual_clip": 10.0}, mini_batches=4
    )


def prime(*, metric: str = "acc") -> Algorithm:
    """PRIME (Cui et al. 2025, arXiv:2502.01456): RLOO of the outcome and of implicit process rewards, whitened.

    The batch needs ``process_rewards``, from ``rewards.implicit_process`` of a model that is trained with
    ``losses.implicit_reward`` on the rollouts of each step. Only prompts that 20 % to 80 % of the samples solve are
    trained on. 4 samples, no KL.
    """
    return Algorithm(
        name="prime",
        group_size=4,
        filter=GroupFilter(metric=metric, keep=use(filters.solve_rate, low=0.2, high=0.8)),
        advantage=advantage.prime,
        normalization=advantage.whiten,
    )
