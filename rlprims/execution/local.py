"""One process, one device: a Hugging Face causal language model that samples, scores and is trained."""

from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from rlprims.algorithms import Algorithm
from rlprims.data_proto import DataProto
from rlprims.execution import BatchStream, Finish, ModelConfig, OptimizerConfig, RunNeeds, Sampling, UpdateReport
from rlprims.execution._config import TOLERANCE
from rlprims.execution._observed import SingleProcess, metered
from rlprims.execution._protocol import finished, load_version, save_version
from rlprims.execution.hf import Generation, RewardModel, Training, meter_of, with_counts, with_critic_counts
from rlprims.execution.hf._families import check_sampled
from rlprims.execution.hf._training import of_training

__all__ = ["LocalExecution"]


class LocalExecution(SingleProcess):
    """:class:`rlprims.execution.Models` and :class:`rlprims.execution.Observable` in one process.

    It samples from the same weights that it trains.
    """

    overlaps = False

    def __init__(
        self, model: ModelConfig, optimizer: OptimizerConfig, *, tokenizer: Any, **run: Unpack[RunNeeds]
    ) -> None:
        self.tokenizer = tokenizer
        model = model.here()
        self.training = Training(model, optimizer, **run)
        self.reward_model = RewardModel(model) if model.reward else None
        check_sampled(self.training.policy.module)
        policy, rows = self.training.policy.module, model.max_rows_per_generation
        self.generation = Generation(policy, tokenizer, max_rows=rows, routes=model.replay_routes, model=model)
        self.pad_token_id = self.generation.pad_token_id
        self.context_window = self.training.context_window
        self.weights_version, self.tolerance = 1, TOLERANCE[model.dtype]
        self.meter = meter_of(self.training)

    @metered
    def generate(self, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int | None) -> DataProto:
        rows = self.generation.generate(prompts, sampling, seed=seed, prompt_width=prompt_width)
        rows["weights_version"] = torch.full((len(rows),), self.weights_version)
        return rows

    def stream(
        self, sampling: Sampling, *, seed: int, prompt_width: int | None, over_updates: bool = False
    ) -> BatchStream:
        generate = partial(self.generate, sampling=sampling, seed=seed, prompt_width=prompt_width)
        return BatchStream(generate, versions=over_updates)

    log_probs = of_training(Training.log_probs)
    entropies = of_training(Training.entropies)
    top_tokens = of_training(Training.top_tokens)
    teacher_log_probs = of_training(Training.teacher_log_probs)
    teacher_top = of_training(Training.teacher_top)
    values = of_training(Training.values)

    @metered
    def reward_scores(self, batch: DataProto) -> Tensor:
        if self.reward_model is None:
            raise ValueError("no reward model was loaded: set model.reward")
        return self.reward_model.scores(batch)

    @metered
    def update(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        whole, totals = with_counts(batch, algorithm)
        return self.training.update(whole, algorithm, totals)

    @metered
    def update_critic(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        whole, totals = with_critic_counts(batch, algorithm)
        return self.training.update_critic(whole, algorithm, totals)

    def sync_weights(self) -> None:
        """The sampler reads the trained weights themselves."""
        self.weights_version += 1

    def close(self) -> None:
        """Nothing to release."""

    def save(self, directory: Path) -> Finish:
        for name, state in self.training.train_states().items():
            state.save(directory, name)
        self.training.save_followers(directory)
        self.tokenizer.save_pretrained(directory / "policy")
        save_version(directory, self.weights_version)
        return finished

    def load(self, directory: Path) -> None:
        for name, state in self.training.train_states().items():
            state.load(directory, name)
        self.training.load_followers(directory)
        self.weights_version = load_version(directory)
