"""The models that are trained, their reference, and the verbs on them: measure a batch, or make an optimizer step."""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from rlprims import diagnostics
from rlprims.algorithms import Algorithm, policy_objective, step_counts, value_objective
from rlprims.batching import micro_batches
from rlprims.data_proto import DataProto
from rlprims.execution._config import ModelConfig, OptimizerConfig
from rlprims.execution._kept import kept_of
from rlprims.execution._protocol import UpdateReport
from rlprims.execution.hf._adapters import adapt, adapters_off
from rlprims.execution.hf._forward import (
    check_fused_objective,
    fused_objective,
    response_values,
    token_scores,
    trimmed,
)
from rlprims.execution.hf._models import load_causal_lm, load_critic, usable_device
from rlprims.execution.hf._packed import packed_micro_batches
from rlprims.execution.hf._train_state import TrainState
from rlprims.grouping import dense_ids
from rlprims.types import Metric, Metrics, Totals, merge_metrics

StepTotals: TypeAlias = Mapping[str, Totals]
"""The totals of a step by their names: of the policy's tokens, and of each loss term that counts its own."""


class Ranks(NamedTuple):
    """The processes that share a model; each has some rows of a batch, and the totals of the whole batch."""

    size: int
    shard: Callable[[nn.Module], nn.Module]
    """Wrap a module so that its gradients are means over the ranks."""
    largest: Callable[[int], int]
    """The largest of the ranks' numbers."""


SINGLE_PROCESS = Ranks(1, lambda module: module, lambda number: number)


def with_counts(batch: DataProto, algorithm: Algorithm) -> tuple[DataProto, StepTotals]:
    """The batch of an optimizer step with what its means divide by, and its totals. Call it before it is split."""
    counts = step_counts(algorithm, dict(batch.batch.items()))
    return batch.union(DataProto.from_dict(tensors=counts.columns)), counts.totals


def token_budget(config: ModelConfig, longest: int) -> int:
    """Tokens of a micro-batch; without a setting 16384, or the longest row if that is longer."""
    return config.max_tokens_per_micro_batch or max(16384, longest)


def without_tokens(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masks among the columns, like ``response_mask``, with no token left."""
    shape = columns["response_mask"].shape
    tensors = {name: x for name, x in columns.items() if isinstance(x, Tensor)}  # not the kept sets
    masks = {name: x for name, x in tensors.items() if x.dtype is torch.bool and x.shape == shape}
    return {name: torch.zeros_like(x) for name, x in masks.items()}


class Training:
    """The policy, and the reference and critic if the algorithm's signatures name their outputs.

    ``roles`` limits which of them are loaded. With ranks these are this rank's shards, and a batch is this rank's rows.
    Call every method on all ranks in the same order: a forward pass communicates.

    Raises:
        ValueError: a model cannot be loaded, or ``model.fused_head`` or ``model.packing`` does not fit what is trained.
    """

    def __init__(
        self,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        *,
        algorithm: Algorithm,
        temperature: float,
        updates: int,
        critic_optimizer: OptimizerConfig | None = None,
        critic_updates: int | None = None,
        ranks: Ranks = SINGLE_PROCESS,
        roles: Collection[str] = ("actor", "reference", "critic"),
    ) -> None:
        if model.fused_head and ranks is not SINGLE_PROCESS:
            raise ValueError(
                "model.fused_head: expected one process that holds the whole head, got ranks that share it. "
                "Set model.fused_head: false with execution: ray"
            )
        if model.fused_head and "actor" in roles:
            check_fused_objective(algorithm)
        self.model = model
        self.ranks = ranks
        self.device = usable_device(model)
        self.temperature = temperature
        self._policy: TrainState | None = None
        self.reference: nn.Module | None = None
        self.critic: TrainState | None = None
        needs_reference = "reference" in roles and "ref_log_probs" in algorithm.needs
        if needs_reference and (model.reference or model.lora is None or "actor" not in roles):
            reference = load_causal_lm(model.reference or model.path, model)
            self.reference = ranks.shard(reference.requires_grad_(False))
        if "actor" in roles:
            policy = adapt(load_causal_lm(model.path, model), model.lora)
            self.context_window = int(getattr(policy.config, "max_position_embeddings", 2**31))
            self._policy = TrainState(ranks.shard(policy), optimizer, updates)
            if needs_reference and self.reference is None:
                self.reference = self.policy.module  # with its adapters off
        if "critic" in roles and "values" in algorithm.needs:
            module = ranks.shard(adapt(load_critic(model.critic or model.path, model), model.lora))
            self.critic = TrainState(module, critic_optimizer or optimizer, critic_updates or updates)

    @property
    def policy(self) -> TrainState:
        if self._policy is None:
            raise ValueError("no policy was loaded: this pool has other roles")
        return self._policy

    def log_probs(self, batch: DataProto, *, reference: bool = False, temperature: float | None = None) -> Tensor:
        """At the sampler's temperature, or another."""
        model = self.reference if reference else self.policy.module
        if model is None:
            raise ValueError("no reference model was loaded: the algorithm's signatures did not ask for ref_log_probs")
        with adapters_off(model) if reference else nullcontext():
            return self._policy_scores(batch, model, "log_probs", temperature)

    def entropies(self, batch: DataProto) -> Tensor:
        return self._policy_scores(batch, self.policy.module, "entropies")

    def values(self, batch: DataProto) -> Tensor:
        critic = self._critic().module
        return self._per_token(batch, lambda part: response_values(critic, part).float(), packing=False)

    def update(self, batch: DataProto, algorithm: Algorithm, totals: StepTotals) -> UpdateReport:
        """One optimizer step. Loss and metrics are this rank's share of those of the whole step."""
        module = self.policy.module
        bounds = {k: v for k, v in algorithm.policy_loss.hyperparameters.items() if k in ("clip_low", "clip_high")}
        if self.model.fused_head:
            check_fused_objective(algorithm)

        def forward(part: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
            if self.model.fused_head:
                loss, scores = fused_objective(
                    module, part, algorithm, temperature=self.temperature, packing=self.model.packing
                )
            else:
                scores = token_scores(
                    module,
                    part,
                    temperature=self.temperature,
                    wanted=["log_probs", "entropies", *(["whole_log_probs"] if "kept" in part else [])],
                    packing=self.model.packing,
                    fused_head=False,
                    entropy_gradient="entropies" in algorithm.loss_needs,
                )
                loss = policy_objective(algorithm, {**part, **scores})
            mask = part["response_mask"]
            metrics: Metrics = {"entropy": diagnostics.token_mean(scores["entropies"], mask)}
            if "whole_log_probs" in scores:
                metrics |= diagnostics.kept_mass(scores["log_probs"], scores["whole_log_probs"], mask)
            if "old_log_probs" in part:
                old, advantages = part["old_log_probs"], part["advantages"]
                metrics |= diagnostics.policy_update(scores["log_probs"], old, advantages, mask, **bounds)
            return loss, metrics

        together = None if algorithm.splits_rollouts else "trajectory_ids"
        return self._optimizer_step(self.policy, batch, totals, forward, packing=self.model.packing, together=together)

    def update_critic(self, batch: DataProto, algorithm: Algorithm, totals: StepTotals) -> UpdateReport:
        critic = self._critic()

        def forward(part: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
            return value_objective(algorithm, {**part, "new_values": response_values(critic.module, part).float()}), {}

        together = None if algorithm.splits_rollouts else "trajectory_ids"
        return self._optimizer_step(critic, batch, totals, forward, packing=False, together=together)

    def train_states(self) -> dict[str, TrainState]:
        """The models that are trained, by name: they belong in a checkpoint."""
        states = {"policy": self._policy, "critic": self.critic}
        return {name: state for name, state in states.items() if state is not None}

    def _critic(self) -> TrainState:
        if self.critic is None:
            raise ValueError("no critic was loaded: the algorithm's signatures did not ask for values")
        return self.critic

    def _policy_scores(self, batch: DataProto, model: nn.Module, name: str, temperature: float | None = None) -> Tensor:
        def forward(part: dict[str, Tensor]) -> Tensor:
            return token_scores(
                model,
                part,
                temperature=self.temperature if temperature is None else temperature,
                wanted=[name],
                packing=self.model.packing,
                fused_head=self.model.fused_head,
            )[name]

        return self._per_token(batch, forward, packing=self.model.packing)

    def _parts(
        self, batch: DataProto, *, packing: bool, together: str | None = None
    ) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Micro-batches within the token budget, each with its row numbers, on the device; as many on every rank.

        Rows with the same id in the column ``together``, if the batch has it, are in one of them. A rank with fewer
        micro-batches also gives some without row numbers and without valid tokens.
        """
        tensors = {name: tensor.to(self.device) for name, tensor in batch.batch.items() if not tensor.is_nested}
        kept = kept_of(batch)
        ids = {name: batch[name] for name in ("group_ids", "trajectory_ids") if "trajectory_ids" in tensors}
        labels = batch[together].tolist() if together is not None and together in tensors else None
        width, attention = batch["prompts"].shape[1], batch["attention_mask"].bool()
        prompts, responses = attention[:, :width].sum(-1).tolist(), attention[:, width:].sum(-1).tolist()
        budget = token_budget(self.model, max(map(operator.add, prompts, responses), default=1))
        if packing:
            known = torch.where(attention[:, :width], batch["prompts"], -1)
            same = torch.unique(known, dim=0, return_inverse=True)[1].tolist() if len(batch) else []
            parts = packed_micro_batches(same, prompts, responses, labels, max_tokens=budget)
        else:
            parts = micro_batches(prompts, responses, labels, max_tokens=budget)
        # Before the first forward pass, in which the ranks wait for each other.
        missing = self.ranks.largest(len(parts)) - len(parts)
        for rows in parts:
            dense = {name: dense_ids(x[rows]).to(self.device) for name, x in ids.items()}
            yield rows, {**trimmed(tensors, rows, kept), **dense}
        for _ in range(missing):
            part = trimmed(tensors, [0], kept)
            dense = {name: torch.zeros_like(part[name]) for name in ids}
            yield [], {**part, **dense, **without_tokens(part)}

    @torch.no_grad()
    def _per_token(self, batch: DataProto, forward: Callable[[dict[str, Tensor]], Tensor], *, packing: bool) -> Tensor:
        result = torch.zeros(batch["response_mask"].shape)
        for rows, part in self._parts(batch, packing=packing):
            x = torch.where(part["response_mask"], forward(part), 0.0)
            if rows:
                result[rows, : x.shape[1]] = x.cpu()
        return result

    def _optimizer_step(
        self,
        state: TrainState,
        batch: DataProto,
        totals: StepTotals,
        forward: Callable[[dict[str, Tensor]], tuple[Tensor, Metrics]],
        *,
        packing: bool,
        together: str | None,
    ) -> UpdateReport:
        loss, metrics = 0.0, dict[str, Metric]()
        state.optimizer.zero_grad(set_to_none=True)  # an exception in the last step may have left gradients
        for _, part in self._parts(batch, packing=packing, together=together):
            part_loss, part_metrics = forward({**part, **totals})  # type: ignore[dict-item]
            # Ranks average their gradients. The totals are those of the whole step, so the sum is wanted.
            (part_loss * self.ranks.size).backward()  # type: ignore[no-untyped-call]
            loss += float(part_loss.detach())
            metrics = merge_metrics(metrics, part_metrics)
        norm, lr, skipped = state.step()
        return UpdateReport(loss, norm, lr, skipped, metrics)
