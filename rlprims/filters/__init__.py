"""What to keep: groups, one answer per row; tokens; and the accumulator that samples until enough groups are kept.

A selection of tokens is a bool per token, of the whole step: ``losses * selection``, or a mask for another loss term.
"""

from rlprims.filters._clip_cov import clip_cov
from rlprims.filters._completed import completed
from rlprims.filters._difficulty_pools import DifficultyPools
from rlprims.filters._dynamic_sampling import DynamicSampling, SamplingExhausted
from rlprims.filters._finite import finite
from rlprims.filters._high_entropy import high_entropy
from rlprims.filters._kl_cov import kl_cov
from rlprims.filters._m2po import m2po
from rlprims.filters._max_variance import max_variance
from rlprims.filters._nonzero_range import nonzero_range
from rlprims.filters._policy_filtration import policy_filtration
from rlprims.filters._solve_rate import solve_rate
from rlprims.filters._varied_components import varied_components

__all__ = [
    "DifficultyPools",
    "DynamicSampling",
    "SamplingExhausted",
    "clip_cov",
    "completed",
    "finite",
    "high_entropy",
    "kl_cov",
    "m2po",
    "max_variance",
    "nonzero_range",
    "policy_filtration",
    "solve_rate",
    "varied_components",
]
