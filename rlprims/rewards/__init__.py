"""Scores of responses and rewards of tokens. ``rewards.verifiers`` scores texts.

A function that shapes a score returns a term (B,) to be added to it: ``scores + overlong_penalty(...) + ...``.
"""

from rlprims.rewards import verifiers
from rlprims.rewards._length import (
    cosine_length,
    linear_cost,
    overlong_penalty,
    relative_length,
    solve_rate_length,
    truncation_penalty,
)
from rlprims.rewards._scores import combine, repetition_penalty, rescale
from rlprims.rewards._tokens import at_last_token, implicit_process, kl_penalty, potential_shaping

__all__ = [
    "at_last_token",
    "combine",
    "cosine_length",
    "implicit_process",
    "kl_penalty",
    "linear_cost",
    "overlong_penalty",
    "potential_shaping",
    "relative_length",
    "repetition_penalty",
    "rescale",
    "solve_rate_length",
    "truncation_penalty",
    "verifiers",
]
