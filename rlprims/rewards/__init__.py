"""From a response's score to the reward on its tokens. ``rewards.verifiers`` scores texts.

Whatever shapes a score returns a term (B,), and terms are added: ``scores + overlong_penalty(...) + ...``.
"""

from rlprims.rewards import verifiers
from rlprims.rewards._combine import combine
from rlprims.rewards._cosine_length import cosine_length
from rlprims.rewards._kl_penalty import kl_penalty
from rlprims.rewards._overlong_penalty import overlong_penalty
from rlprims.rewards._placement import at_last_token
from rlprims.rewards._potential_shaping import potential_shaping
from rlprims.rewards._relative_length import relative_length
from rlprims.rewards._repetition_penalty import repetition_penalty
from rlprims.rewards._rescale import rescale
from rlprims.rewards._solve_rate_length import solve_rate_length
from rlprims.rewards._truncation_penalty import truncation_penalty

__all__ = [
    "at_last_token",
    "combine",
    "cosine_length",
    "kl_penalty",
    "overlong_penalty",
    "potential_shaping",
    "relative_length",
    "repetition_penalty",
    "rescale",
    "solve_rate_length",
    "truncation_penalty",
    "verifiers",
]
