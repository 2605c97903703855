"""Hugging Face models in one process: forward passes, optimizer steps and sampling.

All implementations of :class:`rlprims.execution.Execution` use them, in one process or with a shard per process.
"""

from rlprims._imports import uncollected

with uncollected():
    from rlprims.execution.hf._flops import meter_of
    from rlprims.execution.hf._generation import Generation, prompt_ids, special_ids, with_responses
    from rlprims.execution.hf._reward_model import RewardModel
    from rlprims.execution.hf._stored import StoredTraining
    from rlprims.execution.hf._training import SINGLE_PROCESS, Ranks, StepTotals, Training, with_counts, without_tokens

__all__ = [
    "SINGLE_PROCESS",
    "Generation",
    "Ranks",
    "RewardModel",
    "StepTotals",
    "StoredTraining",
    "Training",
    "meter_of",
    "prompt_ids",
    "special_ids",
    "with_counts",
    "with_responses",
    "without_tokens",
]
