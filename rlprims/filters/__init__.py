"""Selection of the groups, the rows of a group, or the tokens to train on, and of the prompts to sample.

Use a selection of tokens, a bool per token of the whole step, as a factor, ``losses * selection``, or a term's mask.
"""

from rlprims._near import suggest_attributes
from rlprims.filters._balanced import bapo
from rlprims.filters._dynamic_sampling import DifficultyPools, DynamicSampling, SamplingExhausted
from rlprims.filters._groups import (
    completed_groups, finite_scores, max_variance, solve_rate, varied_components, varied_scores,
)  # fmt: skip
from rlprims.filters._policy_filtration import policy_filtration
from rlprims.filters._tokens import clip_cov, finite_tokens, high_entropy, kl_cov, m2po

__all__ = [
    "DifficultyPools", "DynamicSampling", "SamplingExhausted", "bapo", "clip_cov", "completed_groups",
    "finite_scores", "finite_tokens", "high_entropy", "kl_cov", "m2po", "max_variance", "policy_filtration",
    "solve_rate", "varied_components", "varied_scores",
]  # fmt: skip

suggest_attributes(__name__, __all__)
