"""Hugging Face models in one process: what they compute, how they learn, how they are sampled from.

Any implementation of the contract is made of these: one process of them, or many, each with its shard.
"""

from rlprims.execution.hf._flops import meter_of
from rlprims.execution.hf._generation import Generation, prompt_ids, special_ids, with_responses
from rlprims.execution.hf._reward_model import RewardModel
from rlprims.execution.hf._training import ALONE, Ranks, Training, with_totals

__all__ = [
    "ALONE",
    "Generation",
    "Ranks",
    "RewardModel",
    "Training",
    "meter_of",
    "prompt_ids",
    "special_ids",
    "with_responses",
    "with_totals",
]
