"""The models of a training process: measure a batch, or do an optimizer step."""

import json
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from rlprims import diagnostics
from rlprims.algorithms import Algorithm, policy_objective, step_counts, value_objective
from rlprims.batching import micro_batches, prefix_tree
from rlprims.controllers import Ema
from rlprims.data_proto import DataProto
from rlprims.execution._config import ModelConfig, OptimizerConfig
from rlprims.execution._kept import kept_of
from rlprims.execution._protocol import UpdateReport
from rlprims.execution.hf._adapters import adapt, adapters_off
from rlprims.execution.hf._forward import (
    fused_objective,
    is_sum_of_token_losses,
    response_values,
    token_scores,
    trimmed,
)
from rlprims.execution.hf._models import (
    check_vocabularies,
    load_causal_lm,
    load_critic,
    restore,
    save_model,
    usable_device,
)
from rlprims.execution.hf._packed import packed_micro_batches
from rlprims.execution.hf._routes import ROUTES, replay_routes, tree_ids, without_routes
from rlprims.execution.hf._train_state import TrainState
from rlprims.grouping import dense_ids, rows_by_label
from rlprims.types import Metric, Metrics, Totals, merge_metrics

StepTotals: TypeAlias = Mapping[str, Totals]
"""The totals of a step by name: of the policy's tokens, and of each loss term with its own tokens."""


class Ranks(NamedTuple):
    """The processes that share a model. Each has some rows of a batch, and the totals of the whole batch."""

    size: int
    """Parts of a batch: fewer than processes where some compute the same rows together."""
    shard: Callable[[nn.Module], nn.Module]
    """Wrap a module so that its gradients are means over the ranks."""
    load: Callable[[str, ModelConfig], nn.Module]
    """Load a causal language model and wrap it. If its files can be read in parts, no rank loads the whole model."""
    largest: Callable[[int], int]
    """The maximum of a number over the ranks."""
    within: Callable[[nn.Module, Callable[[], Any]], Any]
    """Call a function while the weights outside the module's layers, such as the LM head's, are whole."""
    reduce_next: Callable[[nn.Module, bool], None]
    """Set whether the next backward pass of a module sums the gradients over the ranks, or keeps them on the rank."""


SINGLE_PROCESS = Ranks(
    size=1,
    shard=lambda module: module,
    load=load_causal_lm,
    largest=lambda number: number,
    within=lambda module, compute: compute(),
    reduce_next=lambda module, last: None,
)


def with_counts(batch: DataProto, algorithm: Algorithm) -> tuple[DataProto, StepTotals]:
    """The batch of an optimizer step with the counts for its means, and its totals. Call it before the split."""
    counts = step_counts(algorithm, dict(batch.batch.items()))
    return batch.union(DataProto.from_dict(tensors=counts.columns)), counts.totals


def token_budget(config: ModelConfig, longest: int) -> int:
    """The tokens of a micro-batch: as configured, else 16384, or the longest row (pair, rollout) if that is longer."""
    return config.max_tokens_per_micro_batch or max(16384, longest)


def _largest_unit(prompts: Sequence[int], responses: Sequence[int], labels: Sequence[Hashable] | None) -> int:
    """The tokens, with padding, of the largest row, or of the largest set of rows that stay together."""
    units = [[row] for row in range(len(prompts))] if labels is None else rows_by_label(labels)
    sizes = (len(rows) * (max(prompts[i] for i in rows) + max(responses[i] for i in rows)) for rows in units)
    return max(sizes, default=1)


def without_tokens(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masks among the columns, such as ``response_mask``, set to False everywhere."""
    shape = columns["response_mask"].shape
    tensors = {name: x for name, x in columns.items() if isinstance(x, Tensor)}  # not the kept sets
    masks = {name: x for name, x in tensors.items() if x.dtype is torch.bool and x.shape == shape}
    return {name: torch.zeros_like(x) for name, x in masks.items()}


class Training:
    """The policy; and the reference, the teachers and the critic if the algorithm reads their outputs.

    ``roles`` limits which of them are loaded. With ranks these are this rank's shards, and a batch is this rank's rows.
    Call every method on all ranks in the same order: a forward pass communicates.

    Raises:
        ValueError: a model cannot be loaded, or ``model.fused_head`` or ``model.packing`` does not fit the model.
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
        roles: Collection[str] = ("actor", "reference", "teacher", "critic"),
    ) -> None:
        self.model = model
        self.ranks = ranks
        self.device = usable_device(model)
        self.temperature = temperature
        self._policy: TrainState | None = None
        self.reference: nn.Module | None = None
        self.critic: TrainState | None = None
        self.teachers: dict[str, nn.Module] = {}
        needs_reference = "reference" in roles and "ref_log_probs" in algorithm.needs
        if needs_reference and (model.reference or model.lora is None or "actor" not in roles):
            self.reference = ranks.load(model.reference or model.path, model).requires_grad_(False)
        # FSDP casts shards as it gathers them; adapters are float32 beside frozen weights in any dtype.
        in_float32 = ranks is not SINGLE_PROCESS and model.lora is None
        trained_as = model.model_copy(update={"dtype": "float32"}) if in_float32 else model
        if "actor" in roles:
            if model.lora is None:
                policy = ranks.load(model.path, trained_as)
            else:
                policy = ranks.shard(adapt(load_causal_lm(model.path, trained_as), model.lora))
            if model.replay_routes:
                replay_routes(policy)
            self.context_window = int(getattr(policy.config, "max_position_embeddings", 2**31))
            self._policy = TrainState(policy, optimizer, updates)
            if needs_reference and self.reference is None:
                self.reference = self.policy.module  # the policy with its adapters off
        if "teacher" in roles and algorithm.needs_teacher:
            check_vocabularies(model)
            for name, path in model.teachers.items():
                self.teachers[name] = ranks.load(path, model).requires_grad_(False)
        self.followers = self._followers(model)
        if "critic" in roles and "values" in algorithm.needs:
            module = ranks.shard(adapt(load_critic(model.critic or model.path, trained_as), model.lora))
            self.critic = TrainState(module, critic_optimizer or optimizer, critic_updates or updates)

    @property
    def policy(self) -> TrainState:
        if self._policy is None:
            raise ValueError("no policy was loaded: this pool has other roles")
        return self._policy

    def log_probs(self, batch: DataProto, *, reference: bool = False, temperature: float | None = None) -> Tensor:
        """The log-probs at the sampler's temperature, or at another."""
        model = self.reference if reference else self.policy.module
        if model is None:
            raise ValueError("no reference model was loaded: the algorithm does not read ref_log_probs")
        with adapters_off(model) if reference else nullcontext():
            return self._policy_scores(without_routes(batch) if reference else batch, model, "log_probs", temperature)

    def teacher_log_probs(self, batch: DataProto) -> Tensor:
        """The log-probs of the teacher; if there are several, of the one that the column ``teacher`` names."""
        return self._by_teacher(batch, lambda rows, teacher: self._policy_scores(rows, teacher, "log_probs"))

    def top_tokens(self, batch: DataProto, size: int) -> Tensor:
        """int64 (B, T, K): the likeliest tokens of the policy."""
        return self._top(batch, self.policy.module, size)["topk_ids"]

    def teacher_top(self, batch: DataProto, size: int) -> DataProto:
        """``topk_ids`` of the batch or of the teacher, and ``teacher_topk_log_probs`` of these tokens."""

        def top(rows: DataProto, teacher: nn.Module) -> Tensor:
            found = self._top(rows, teacher, size)
            return torch.cat([found["topk_ids"].double(), found["topk_log_probs"].double()], -1)  # exact: ids < 2^53

        ids, log_probs = self._by_teacher(batch, top).chunk(2, -1)
        return DataProto.from_dict(tensors={"topk_ids": ids.long(), "teacher_topk_log_probs": log_probs.float()})

    def _by_teacher(self, batch: DataProto, measure: Callable[[DataProto, nn.Module], Tensor]) -> Tensor:
        if not self.teachers:
            raise ValueError("no teacher was loaded: the algorithm does not read teacher_log_probs")
        batch = without_routes(batch)
        if len(self.teachers) == 1:
            return measure(batch, next(iter(self.teachers.values())))
        names = batch["teacher"] if "teacher" in batch else [None] * len(batch)
        if unknown := sorted({str(name) for name in names} - self.teachers.keys()):
            raise ValueError(
                f"the column teacher has {unknown}; model.teacher has {sorted(self.teachers)}: set data.teacher"
            )
        result: Tensor | None = None
        for name, teacher in self.teachers.items():
            rows = torch.tensor([each == name for each in names], dtype=torch.bool)
            if self.ranks.size > 1:  # all rows, so that all ranks do the same forward passes
                scores = measure(batch, teacher)[rows]
            elif rows.any():
                scores = measure(batch[rows], teacher)
            else:
                continue
            result = scores.new_zeros(len(batch), *scores.shape[1:]) if result is None else result
            result[rows] = scores
        assert result is not None
        return result

    def _top(self, batch: DataProto, model: nn.Module, size: int) -> dict[str, Tensor]:
        size = min(size, model.config.get_text_config().vocab_size)  # type: ignore[union-attr,operator]
        shape = (*batch["response_mask"].shape, size)
        found = {"topk_ids": torch.zeros(shape, dtype=torch.int64), "topk_log_probs": torch.zeros(shape)}
        with torch.no_grad():
            for rows, part, _ in self._parts(batch, packing=self.model.packing):
                scores = self._token_scores(model, part, self.temperature, ["topk_log_probs"], top=size)
                if rows:
                    for name, x in scores.items():
                        found[name][rows, : x.shape[1]] = x.to("cpu", found[name].dtype)
        return found

    def entropies(self, batch: DataProto) -> Tensor:
        return self._policy_scores(batch, self.policy.module, "entropies")

    def values(self, batch: DataProto) -> Tensor:
        critic = self._critic().module
        rows = without_routes(batch)
        return self._per_token(rows, lambda part: response_values(critic, part).float(), packing=False)

    def update(self, batch: DataProto, algorithm: Algorithm, totals: StepTotals) -> UpdateReport:
        """One optimizer step. Loss and metrics are this rank's share of those of the whole step."""
        module = self.policy.module
        bounds = {k: v for k, v in algorithm.policy_loss.hyperparameters.items() if k in ("clip_low", "clip_high")}

        def forward(part: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
            loss, scores = self._objective(part, algorithm)
            mask = part["response_mask"]
            metrics: Metrics = {"entropy": diagnostics.token_mean(scores["entropies"], mask)}
            if "whole_log_probs" in scores:
                metrics |= diagnostics.kept_mass(scores["log_probs"], scores["whole_log_probs"], mask)
            if "old_log_probs" in part:
                old, advantages = part["old_log_probs"], part["advantages"]
                metrics |= diagnostics.policy_update(scores["log_probs"], old, advantages, mask, **bounds)
            return loss, metrics

        packing, together = self.model.packing, algorithm.together
        report = self._optimizer_step(self.policy, batch, totals, forward, packing=packing, together=together)
        for follower, ema in self.followers.values():
            ema.update(dict(follower.named_parameters()), dict(module.named_parameters()))
        return report

    def _objective(self, part: dict[str, Tensor], algorithm: Algorithm) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy's objective on a micro-batch, and the token scores that it was computed from."""
        module = self.policy.module
        if self.model.fused_head and is_sum_of_token_losses(algorithm):
            objective = partial(fused_objective, module, part, algorithm, temperature=self.temperature)
            fused: tuple[Tensor, dict[str, Tensor]]
            fused = self.ranks.within(module, partial(objective, packing=self.model.packing))
            return fused
        more = ["topk_log_probs"] if "topk_log_probs" in algorithm.loss_needs else []
        wanted = ["log_probs", "entropies", *more, *(["whole_log_probs"] if "kept" in part else [])]
        gradient = "entropies" in algorithm.loss_needs
        scores = self._token_scores(module, part, self.temperature, wanted, entropy_gradient=gradient)
        return policy_objective(algorithm, {**part, **scores}), scores

    def _followers(self, model: ModelConfig) -> dict[str, tuple[nn.Module, Ema]]:
        """The reference and the teacher, if they follow the policy."""
        found: dict[str, tuple[nn.Module, Ema]] = {}
        modules = {"reference": self.reference, "teacher": next(iter(self.teachers.values()), None)}
        settings = {"reference": model.reference_follows, "teacher": model.teacher_follows}
        for role, follows in settings.items():
            module = modules[role]
            if follows is None or module is None:
                continue
            if self.ranks is not SINGLE_PROCESS:
                raise ValueError(f"model.{role}_follows: expected execution: local, got ranks. Leave it out")
            found[role] = module, Ema(rate=follows.rate, every=follows.every)
        return found

    def save_followers(self, directory: Path) -> None:
        """Write the models that follow the policy, for Hugging Face, and their counts."""
        for role, (module, ema) in self.followers.items():
            save_model(module, directory / role, module.state_dict())
            (directory / f"{role}_ema.json").write_text(json.dumps(ema.state_dict()))

    def load_followers(self, directory: Path) -> None:
        for role, (module, ema) in self.followers.items():
            restore(module, directory / role)
            ema.load_state_dict(json.loads((directory / f"{role}_ema.json").read_text()))

    def update_critic(self, batch: DataProto, algorithm: Algorithm, totals: StepTotals) -> UpdateReport:
        critic = self._critic()

        def forward(part: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
            return value_objective(algorithm, {**part, "new_values": response_values(critic.module, part).float()}), {}

        rows = without_routes(batch)
        return self._optimizer_step(critic, rows, totals, forward, packing=False, together=algorithm.together)

    def train_states(self) -> dict[str, TrainState]:
        """The models that are trained, by name. They are saved in a checkpoint."""
        states = {"policy": self._policy, "critic": self.critic}
        return {name: state for name, state in states.items() if state is not None}

    def _critic(self) -> TrainState:
        if self.critic is None:
            raise ValueError("no critic was loaded: the algorithm does not read values")
        return self.critic

    def _policy_scores(self, batch: DataProto, model: nn.Module, name: str, temperature: float | None = None) -> Tensor:
        at = self.temperature if temperature is None else temperature

        def forward(part: dict[str, Tensor]) -> Tensor:
            return self._token_scores(model, part, at, [name])[name]

        return self._per_token(batch, forward, packing=self.model.packing)

    def _token_scores(
        self, model: nn.Module, part: dict[str, Tensor], temperature: float, wanted: list[str], **options: Any
    ) -> dict[str, Tensor]:
        fused = self.model.fused_head and "topk_log_probs" not in wanted  # which need the whole vocabulary
        packing = self.model.packing
        compute = partial(token_scores, model, part, temperature=temperature, wanted=wanted, packing=packing, **options)
        if not fused:  # the model's own forward pass, in which ranks also gather the whole head
            return compute(fused_head=False)
        scores: dict[str, Tensor] = self.ranks.within(model, partial(compute, fused_head=True))
        return scores

    def _parts(
        self, batch: DataProto, *, packing: bool, together: str | None = None
    ) -> Iterator[tuple[list[int], dict[str, Tensor], bool]]:
        """Micro-batches within the token budget, with their row numbers, on the device; the same number on every rank.

        Each has a bool that is True for the last one.

        Rows with the same id in the column ``together``, if the batch has it, are in one micro-batch. A rank with fewer
        micro-batches also yields some without row numbers and without valid tokens.
        """
        routes = batch[ROUTES] if self.model.replay_routes and ROUTES in batch else None
        rows_of = without_routes(batch).batch.items()
        tensors = {name: tensor.to(self.device) for name, tensor in rows_of if not tensor.is_nested}
        kept = kept_of(batch)
        ids = {name: batch[name] for name in ("group_ids", "trajectory_ids") if name in tensors}
        labels = batch[together].tolist() if together is not None and together in tensors else None
        width, attention = batch["prompts"].shape[1], batch["attention_mask"].bool()
        prompts, responses = attention[:, :width].sum(-1).tolist(), attention[:, width:].sum(-1).tolist()
        budget = token_budget(self.model, _largest_unit(prompts, responses, labels))
        if packing:
            tokens = torch.cat([batch["prompts"], batch["responses"]], 1)
            if routes is not None and len(batch):
                tokens = tree_ids(tokens, routes, self.device)
                tensors["tree_ids"] = tokens.to(self.device)
            nodes = prefix_tree(tokens, attention).nodes
            parts = packed_micro_batches(nodes, labels, max_tokens=budget)
        else:
            parts = micro_batches(prompts, responses, labels, max_tokens=budget)
        # Before the first forward pass, in which the ranks wait for each other.
        missing = self.ranks.largest(len(parts)) - len(parts)
        count = len(parts) + missing
        for i, rows in enumerate(parts, start=1):
            dense = {name: dense_ids(x[rows]).to(self.device) for name, x in ids.items()}
            yield rows, {**trimmed(tensors, rows, kept, routes), **dense}, i == count
        for i in range(len(parts) + 1, count + 1):
            part = trimmed(tensors, [0], kept, routes)
            dense = {name: torch.zeros_like(part[name]) for name in ids}
            yield [], {**part, **dense, **without_tokens(part)}, i == count

    @torch.no_grad()
    def _per_token(self, batch: DataProto, forward: Callable[[dict[str, Tensor]], Tensor], *, packing: bool) -> Tensor:
        result = torch.zeros(batch["response_mask"].shape)
        for rows, part, _ in self._parts(batch, packing=packing):
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
        state.zero_grad()  # an exception in the last step may have left gradients
        for _, part, last in self._parts(batch, packing=packing, together=together):
            self.ranks.reduce_next(state.module, last)
            part_loss, part_metrics = forward({**part, **totals})  # type: ignore[dict-item]
            # Ranks average their gradients. The totals are those of the whole step, so the sum is wanted.
            (part_loss * self.ranks.size).backward()  # type: ignore[no-untyped-call]
            loss += float(part_loss.detach())
            metrics = merge_metrics(metrics, part_metrics)
        norm, lr, skipped = state.step()
        return UpdateReport(loss, norm, lr, skipped, metrics)
