"""Hugging Face models, in one process or with a shard per process: forward passes, optimizer steps and sampling."""

from rlprims.execution.hf._export import export_model, models_in_shards
from rlprims.execution.hf._flops import meter_of
from rlprims.execution.hf._micro_batches import (
    SINGLE_PROCESS, Ranks, StepTotals, with_counts, with_critic_counts, without_tokens,
)  # fmt: skip
from rlprims.execution.hf._reward_model import RewardModel
from rlprims.execution.hf._sampling import Generation, prompt_ids, special_ids, with_responses
from rlprims.execution.hf._stored import StoredTraining
from rlprims.execution.hf._training import Training

__all__ = [
    "SINGLE_PROCESS", "Generation", "Ranks", "RewardModel", "StepTotals", "StoredTraining", "Training",
    "export_model", "meter_of", "models_in_shards", "prompt_ids", "special_ids", "with_counts", "with_critic_counts",
    "with_responses", "without_tokens",
]  # fmt: skip
