"""Algorithms as data: an :class:`Algorithm` names a primitive for each stage of a step.

>>> from rlprims import algorithms, losses
>>> mine = algorithms.grpo(kl_coef=0.0).replace(name="mine", aggregation=losses.token_mean)
>>> algorithms.diff(algorithms.grpo(kl_coef=0.0), mine)["aggregation.fn"]
('rlprims.losses.seq_mean_token_mean', 'rlprims.losses.token_mean')

Corrections of the sampler's gap, and gates on it, are multiplied into the policy loss of any algorithm:

>>> from rlprims import corrections
>>> corrected = algorithms.dapo().replace(corrections=[corrections.tis, corrections.geometric_gate])
>>> "rollout_log_probs" in corrected.needs
True
"""

from collections.abc import Callable

from rlprims._near import suggest_attributes
from rlprims.algorithms import presets
from rlprims.algorithms._adapters import is_correct, kl_to_old, kl_to_sampler
from rlprims.algorithms._algorithm import (
    Algorithm, Endings, GroupFilter, KLInReward, LossTerm, TeacherTopK, merge, parse,
)  # fmt: skip
from rlprims.algorithms._check import Finding, check
from rlprims.algorithms._diff import diff, settings
from rlprims.algorithms._objective import (
    ObjectiveTerm, StepCounts, objective_parts, policy_losses, policy_objective, step_counts, value_objective,
)  # fmt: skip
from rlprims.algorithms._stages import (
    component_scores, estimate_advantages, fill_invalid_scores, filter_column, filter_groups, leave_out_rows,
    mask_turns, shape_scores, token_weights,
)  # fmt: skip
from rlprims.algorithms._use import BoundFunction, import_path, use
from rlprims.algorithms.presets import *  # noqa: F403
from rlprims.algorithms.presets import DIALECTS

PRESETS: dict[str, Callable[..., Algorithm]] = {name: getattr(presets, name) for name in presets.__all__}
"""The presets that a configuration file may name. In Python call the functions."""

__all__ = [
    "DIALECTS", "PRESETS", "Algorithm", "Endings", "Finding", "GroupFilter", "KLInReward", "LossTerm", "ObjectiveTerm",
    "StepCounts", "TeacherTopK", "BoundFunction", "filter_groups", "check", "component_scores", "diff",
    "estimate_advantages", "filter_column", "import_path", "kl_to_old", "kl_to_sampler", "settings", "leave_out_rows",
    "mask_turns", "merge", "objective_parts", "parse", "policy_losses", "policy_objective", "shape_scores",
    "is_correct", "step_counts", "use", "value_objective", "token_weights", "fill_invalid_scores", *presets.__all__,
]  # fmt: skip

suggest_attributes(__name__, __all__)
