"""Scores of responses and rewards of tokens. ``rewards.verifiers`` scores texts.

A function that shapes a score returns a term (B,) to be added to it: ``scores + overlong_penalty(...) + ...``.
"""

from rlprims._near import suggest_attributes
from rlprims.rewards import verifiers
from rlprims.rewards._length import (
    cosine_length, cost_per_token, overlong_penalty, relative_length, solve_rate_length, truncation_penalty,
)  # fmt: skip
from rlprims.rewards._scores import repetition_penalty, rescale, weighted_score
from rlprims.rewards._tokens import at_last_token, implicit_process, kl_penalty, potential_shaping

__all__ = [
    "at_last_token", "cosine_length", "cost_per_token", "implicit_process", "kl_penalty", "overlong_penalty",
    "potential_shaping", "relative_length", "repetition_penalty", "rescale", "solve_rate_length",
    "truncation_penalty", "verifiers", "weighted_score",
]  # fmt: skip

suggest_attributes(__name__, __all__)
