"""The policy in training: its objective on a batch, and the frozen models that follow it."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from rlprims import diagnostics
from rlprims.algorithms import Algorithm, policy_objective
from rlprims.controllers import Ema
from rlprims.data_proto import DataProto
from rlprims.execution import UpdateReport
from rlprims.execution.hf._forward import fused_objective, is_sum_of_token_losses
from rlprims.execution.hf._micro_batches import StepTotals, parts_of
from rlprims.execution.hf._models import restore, save_model
from rlprims.execution.hf._scorer import Scorer
from rlprims.execution.hf._train_state import TrainState, optimizer_step
from rlprims.types import Metrics


class Policy:
    """A causal language model in training. ``scorer`` computes its log-probs and entropies."""

    def __init__(self, scorer: Scorer, state: TrainState) -> None:
        self.scorer, self.state = scorer, state

    def update(self, batch: DataProto, algorithm: Algorithm, totals: StepTotals) -> UpdateReport:
        """One optimizer step. Loss and metrics are this rank's share of those of the whole step."""
        bounds = {k: v for k, v in algorithm.policy_loss.hyperparameters.items() if k in ("clip_low", "clip_high")}

        def forward(part: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
            loss, scores = self.objective(part, algorithm)
            mask = part["response_mask"]
            metrics: Metrics = {"entropy": diagnostics.token_mean(scores["entropies"], mask)}
            if "whole_log_probs" in scores:
                metrics |= diagnostics.kept_mass(scores["log_probs"], scores["whole_log_probs"], mask)
            if "old_log_probs" in part:
                old, advantages = part["old_log_probs"], part["advantages"]
                metrics |= diagnostics.policy_update(scores["log_probs"], old, advantages, mask, **bounds)
            return loss, metrics

        model, ranks = self.scorer.model, self.scorer.ranks
        parts = parts_of(batch, model, ranks, packing=model.packing, together=algorithm.together)
        return optimizer_step(self.state, parts, totals, forward, ranks)

    def objective(self, part: dict[str, Tensor], algorithm: Algorithm) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective on a micro-batch, and the token scores that it was computed from."""
        scorer, module = self.scorer, self.state.module
        if scorer.model.fused_head and is_sum_of_token_losses(algorithm):
            compute = partial(fused_objective, module, part, algorithm, temperature=scorer.temperature)
            fused: tuple[Tensor, dict[str, Tensor]]
            fused = scorer.ranks.within(module, partial(compute, packing=scorer.model.packing))
            return fused
        more = ["topk_log_probs"] if "topk_log_probs" in algorithm.loss_needs else []
        wanted = ["log_probs", "entropies", *more, *(["whole_log_probs"] if "kept" in part else [])]
        scores = scorer.token_scores(part, wanted, entropy_gradient="entropies" in algorithm.loss_needs)
        return policy_objective(algorithm, {**part, **scores}), scores


class Follower(NamedTuple):
    """A reference or a teacher whose weights follow the policy."""

    role: str
    module: nn.Module
    ema: Ema

    def follow(self, parameters: Mapping[str, Tensor]) -> None:
        self.ema.update(dict(self.module.named_parameters()), dict(parameters))

    def save(self, directory: Path) -> None:
        """Write the model for Hugging Face, and its count of updates."""
        save_model(self.module, directory / self.role, self.module.state_dict())
        (directory / f"{self.role}_ema.json").write_text(json.dumps(self.ema.state_dict()))

    def load(self, directory: Path) -> None:
        restore(self.module, directory / self.role)
        self.ema.load_state_dict(json.loads((directory / f"{self.role}_ema.json").read_text()))
