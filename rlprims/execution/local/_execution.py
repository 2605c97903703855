"""See :class:`LocalExecution`."""

from pathlib import Path
from typing import Any

from torch import Tensor

from rlprims.algorithms import Algorithm
from rlprims.data_proto import DataProto
from rlprims.execution._config import ModelConfig, OptimizerConfig, Sampling
from rlprims.execution._protocol import UpdateReport
from rlprims.execution.hf import Generation, RewardModel, Training, with_totals


class LocalExecution:
    """The :class:`rlprims.execution.Execution` of one process: the policy itself samples, nothing is synchronized."""

    def __init__(
        self,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        *,
        algorithm: Algorithm,
        tokenizer: Any,
        temperature: float,
        updates: int,
        critic_optimizer: OptimizerConfig | None = None,
        critic_updates: int | None = None,
    ) -> None:
        self.training = Training(
            model,
            optimizer,
            algorithm=algorithm,
            temperature=temperature,
            updates=updates,
            critic_optimizer=critic_optimizer,
            critic_updates=critic_updates,
        )
        self.reward_model = RewardModel(model) if model.reward else None
        self.tokenizer = tokenizer
        self.generation = Generation(self.training.policy.module, tokenizer, max_rows=model.max_rows_per_generation)
        self.pad_token_id = self.generation.pad_token_id
        self.context_window = self.training.context_window

    def generate(self, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int) -> DataProto:
        return self.generation.generate(prompts, sampling, seed=seed, prompt_width=prompt_width)

    def log_probs(self, batch: DataProto, *, reference: bool = False) -> Tensor:
        return self.training.log_probs(batch, reference=reference)

    def entropies(self, batch: DataProto) -> Tensor:
        return self.training.entropies(batch)

    def values(self, batch: DataProto) -> Tensor:
        return self.training.values(batch)

    def reward_scores(self, batch: DataProto) -> Tensor:
        if self.reward_model is None:
            raise ValueError("no reward model was loaded: set model.reward")
        return self.reward_model.scores(batch)

    def update(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        whole, totals = with_totals(batch)
        return self.training.update(whole, algorithm, totals)

    def update_critic(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        whole, totals = with_totals(batch)
        return self.training.update_critic(whole, algorithm, totals)

    def sync_weights(self) -> None:
        """The sampler reads the trained weights themselves."""

    def close(self) -> None:
        """Nothing outlives the object."""

    def save(self, directory: Path) -> None:
        for name, learner in self.training.learners().items():
            learner.save(directory, name)
        self.tokenizer.save_pretrained(directory / "policy")

    def load(self, directory: Path) -> None:
        for name, learner in self.training.learners().items():
            learner.load(directory, name)
