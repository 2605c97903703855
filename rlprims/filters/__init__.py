"""Selection of the groups, the rows of a group, or the tokens to train on, and of the prompts to sample.

A selection of tokens is a bool per token of the whole step. Use it as a factor, ``losses * selection``, or as the mask
of another loss term.
"""

from rlprims.filters._balanced import bapo
from rlprims.filters._dynamic_sampling import DifficultyPools, DynamicSampling, SamplingExhausted
from rlprims.filters._groups import completed, finite, max_variance, nonzero_range, solve_rate, varied_components
from rlprims.filters._policy_filtration import policy_filtration
from rlprims.filters._tokens import clip_cov, finite_tokens, high_entropy, kl_cov, m2po

__all__ = [
    "DifficultyPools",
    "DynamicSampling",
    "SamplingExhausted",
    "bapo",
    "clip_cov",
    "completed",
    "finite",
    "finite_tokens",
    "high_entropy",
    "kl_cov",
    "m2po",
    "max_variance",
    "nonzero_range",
    "policy_filtration",
    "solve_rate",
    "varied_components",
]
