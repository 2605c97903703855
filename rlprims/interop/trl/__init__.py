"""TRL's trainers with the advantages and the loss of an :class:`Algorithm`, and verifiers as reward functions.

TRL does everything else: generation, reward functions, batches, accumulation, optimizer, logs. Written for TRL 1.16,
whose private methods are overridden. The import needs no TRL.
"""

from rlprims.interop.trl._rewards import reward_func
from rlprims.interop.trl._trainers import grpo_trainer, rloo_trainer

__all__ = ["grpo_trainer", "reward_func", "rloo_trainer"]
