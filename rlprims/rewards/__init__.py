"""From a response's score to the reward on its tokens. ``rewards.verifiers`` scores texts."""

from rlprims.rewards import verifiers
from rlprims.rewards._kl_penalty import kl_penalty
from rlprims.rewards._overlong_penalty import overlong_penalty
from rlprims.rewards._placement import at_last_token

__all__ = ["at_last_token", "kl_penalty", "overlong_penalty", "verifiers"]
