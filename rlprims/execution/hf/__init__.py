"""Hugging Face models in one process: forward passes, optimizer steps and sampling.

Every implementation of :class:`rlprims.execution.Execution` is built from these, in one process or with a shard each.
"""

from rlprims.execution.hf._flops import meter_of
from rlprims.execution.hf._generation import Generation, prompt_ids, special_ids, with_responses
from rlprims.execution.hf._reward_model import RewardModel
from rlprims.execution.hf._training import SINGLE_PROCESS, Ranks, StepTotals, Training, with_counts, without_tokens

__all__ = [
    "SINGLE_PROCESS",
    "Generation",
    "Ranks",
    "RewardModel",
    "StepTotals",
    "Training",
    "meter_of",
    "prompt_ids",
    "special_ids",
    "with_counts",
    "with_responses",
    "without_tokens",
]
