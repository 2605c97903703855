"""Training on stored rows, in one process: demonstrations, or pairs of a chosen and a rejected response."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlprims import algorithms, diagnostics
from rlprims.algorithms import Algorithm, BoundFunction
from rlprims.data_proto import DataProto
from rlprims.execution import Finish, ModelConfig, OptimizerConfig, UpdateReport, kind_of, reads_reference
from rlprims.execution._observed import SingleProcess, metered
from rlprims.execution._protocol import finished
from rlprims.execution.hf._adapters import adapt
from rlprims.execution.hf._flops import meter_of
from rlprims.execution.hf._forward import last_token_scores
from rlprims.execution.hf._micro_batches import Part, with_counts
from rlprims.execution.hf._models import load_new_classifier
from rlprims.execution.hf._packed import is_packed
from rlprims.execution.hf._train_state import TrainState, optimizer_step
from rlprims.execution.hf._training import Training
from rlprims.grouping import dense_ids
from rlprims.layout import sequence_lengths, sequence_sum
from rlprims.losses import tail_weighted_sums
from rlprims.types import Mean, Metrics, merge_metrics

_SCALES = ("beta", "tau", "odds_coef")
"""Names of the hyperparameter by which losses on pairs scale the rewards."""


class StoredTraining(SingleProcess, Training):
    """Trains on stored rows: a policy, or a reward model if the loss is on scores.

    A batch has the columns of responses (:class:`rlprims.execution.Execution`) except those of the sampler. A batch of
    pairs has the rows chosen, rejected, chosen, ... with ``pair_ids`` int64 and ``is_chosen`` bool (B,), and
    ``ref_sequence_log_probs`` (B,) or ``score_margins`` (B,) if the loss needs them.

    ``means``: compare pairs by means over their tokens instead of sums. ``tail_weight`` is that of
    :func:`rlprims.losses.tail_weighted_sums`.

    Raises:
        ValueError: a model cannot be loaded, or stored rows do not have the data that the loss needs.
    """

    def __init__(
        self,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        *,
        loss: BoundFunction,
        aggregation: BoundFunction,
        tokenizer: Any,
        updates: int,
        means: bool = False,
        tail_weight: float = 1.0,
    ) -> None:
        self.kind, self.loss, self.means, self.tokenizer = kind_of(loss), loss, means, tokenizer
        model, self.tail_weight = model.here(), tail_weight
        self.algorithm: Algorithm = algorithms.sft().replace(aggregation=aggregation)
        if self.kind == "demonstrations":
            self.algorithm = self.algorithm.replace(policy_loss=loss)
        self.scorer: TrainState | None = None
        roles = () if self.kind == "scores" else ("actor",)
        super().__init__(model, optimizer, algorithm=self.algorithm, temperature=1.0, updates=updates, roles=roles)
        if self.kind == "scores":
            module = adapt(load_new_classifier(model.path, model), model.lora)
            self.scorer = TrainState(module, optimizer, updates)
        self.meter = meter_of(self, verb="update_rows")

    def train_states(self) -> dict[str, TrainState]:
        return super().train_states() | ({"reward": self.scorer} if self.scorer is not None else {})

    @metered
    def update_rows(self, batch: DataProto) -> UpdateReport:
        """One optimizer step on the whole batch."""
        (state,) = self.train_states().values()
        whole, totals = with_counts(batch, self.algorithm)
        parts = partial(self._micro_batches, whole)
        forward = self._balanced(self._forward(len(batch) // 2), parts)
        return optimizer_step(state, parts(), totals, forward, self.ranks)

    @metered
    @torch.no_grad()
    def measure_rows(self, batch: DataProto) -> Metrics:
        """The metrics of an update on the batch, without the update."""
        whole, totals = with_counts(batch, self.algorithm)
        forward, metrics = self._forward(len(batch) // 2, learns=False), Metrics()
        for part in self._micro_batches(whole):
            metrics = merge_metrics(metrics, forward({**part.data, **totals})[1])  # type: ignore[dict-item]
        return metrics

    @metered
    def sequence_log_probs(self, batch: DataProto) -> Tensor:
        """float (B,): the log-probs of the responses under the current policy, as sums or, with ``means``, as means."""
        return self._of_responses(self.log_probs(batch), batch)

    def save(self, directory: Path) -> Finish:
        """Write all state to an empty directory, with the model for Hugging Face in ``policy`` or ``reward``."""
        for name, state in self.train_states().items():
            state.save(directory, name)
            self.tokenizer.save_pretrained(directory / name)
        return finished

    def load(self, directory: Path) -> None:
        for name, state in self.train_states().items():
            state.load(directory, name)

    def _micro_batches(self, batch: DataProto) -> Iterator[Part]:
        together = None if self.kind == "demonstrations" else "pair_ids"
        return self._parts(batch, self.kind != "scores" and is_packed(self.policy.module), together)

    def _of_responses(self, log_probs: Tensor, part: Mapping[str, Tensor] | DataProto) -> Tensor:
        mask = part["response_mask"]
        if self.tail_weight != 1:
            return tail_weighted_sums(log_probs, dense_ids(part["pair_ids"]), mask, tail_weight=self.tail_weight)
        sums = sequence_sum(log_probs, mask)
        return sums / sequence_lengths(mask).clamp(min=1) if self.means else sums

    def _forward(self, pairs: int, *, learns: bool = True) -> Callable[[dict[str, Tensor]], tuple[Tensor, Metrics]]:
        """A function from a micro-batch to its share of the loss and its metrics; ``pairs`` counts the whole batch."""

        def demonstrations(part: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
            mask = part["response_mask"]
            if learns:
                loss, scores = self._objective(part, self.algorithm)
            else:
                scores = self._policy_scorer().token_scores(part, ["log_probs", "entropies"])
                loss = scores["log_probs"].new_zeros(())
            return loss, {
                "nll": diagnostics.mean_over_tokens(-scores["log_probs"], mask),
                "entropy": diagnostics.mean_over_tokens(scores["entropies"], mask),
            }

        def of_pairs(part: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
            per_pair, chosen, rejected = self._pair_losses(part)
            return per_pair.sum() / pairs, _pair_metrics(per_pair, chosen, rejected)

        return demonstrations if self.kind == "demonstrations" else of_pairs

    def _pair_losses(self, part: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """float (P,) each: the losses, and the rewards of the chosen and of the rejected responses."""
        chosen = part["is_chosen"]
        if self.scorer is not None:
            scores = last_token_scores(self.scorer.module, part)
            data = {"chosen_scores": scores[chosen], "rejected_scores": scores[~chosen]}
            if "score_margins" in part:
                data["score_margins"] = part["score_margins"][chosen]
            return self.loss(data), data["chosen_scores"], data["rejected_scores"]
        per_token = self._policy_scorer().token_scores(part, ["log_probs"])["log_probs"]
        x = self._of_responses(per_token, part)
        ref = part.get("ref_sequence_log_probs", torch.zeros_like(x))
        data = {"chosen_log_probs": x[chosen], "rejected_log_probs": x[~chosen]}
        if reads_reference(self.loss):
            data |= {"ref_chosen_log_probs": ref[chosen], "ref_rejected_log_probs": ref[~chosen]}
        bound = self.loss.hyperparameters
        rewards = next((bound[name] for name in _SCALES if name in bound), 1.0) * (x - ref)
        return self.loss(data), rewards[chosen], rewards[~chosen]


def _pair_metrics(per_pair: Tensor, chosen: Tensor, rejected: Tensor) -> Metrics:
    """Means over the pairs. A pair is correct if the chosen response has the larger reward."""
    values = {"loss": per_pair, "accuracy": (chosen > rejected).float(), "margin": chosen - rejected}
    values |= {"chosen_reward": chosen, "rejected_reward": rejected}
    count = torch.tensor(len(per_pair), device=per_pair.device)
    return {f"pairs/{name}": Mean(x.detach().sum(), count) for name, x in values.items()}
