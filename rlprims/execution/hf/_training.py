"""See :class:`Training`."""

import operator
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rlprims import diagnostics
from rlprims.algorithms import Algorithm, policy_objective, value_objective
from rlprims.batching import micro_batches
from rlprims.data_proto import DataProto
from rlprims.execution._config import ModelConfig, OptimizerConfig
from rlprims.execution._protocol import UpdateReport
from rlprims.execution.hf._adapters import adapt, adapters_off
from rlprims.execution.hf._head import head_of
from rlprims.execution.hf._learner import Learner
from rlprims.execution.hf._models import (
    device_of,
    load_causal_lm,
    load_critic,
    response_values,
    token_budget,
    trimmed,
)
from rlprims.execution.hf._objective import is_token_wise, token_weights
from rlprims.execution.hf._packed import micro_batches_of_groups, packing, packs
from rlprims.execution.hf._scores import fused_objective, token_scores
from rlprims.losses import count_totals
from rlprims.types import Metric, Metrics, Totals, merge_metrics


class Ranks(NamedTuple):
    """The processes that share a model; each has some rows of a batch and all of its totals."""

    size: int
    shard: Callable[[nn.Module], nn.Module]
    """Wrap a module so that its gradients are means over the ranks."""
    largest: Callable[[int], int]
    """The largest of the ranks' numbers."""


ALONE = Ranks(1, lambda module: module, lambda number: number)


def with_totals(batch: DataProto) -> tuple[DataProto, Totals]:
    """The batch of an optimizer step with ``group_tokens``, and its totals: to be taken before it is split."""
    mask, group_ids = batch["response_mask"], batch["group_ids"]
    lengths = mask.sum(-1)
    group_tokens = torch.zeros_like(lengths).index_add(0, group_ids, lengths)[group_ids]
    return batch.union(DataProto.from_dict(tensors={"group_tokens": group_tokens})), count_totals(
        mask, group_ids=group_ids
    )


class Training:
    """The policy, and the reference and critic that the algorithm's signatures ask for, or this rank's shards of them;
    of these the ones that are its ``roles``.

    A batch is this rank's rows. All ranks must be called alike: a forward is a conversation between them.
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
        ranks: Ranks = ALONE,
        roles: Collection[str] = ("actor", "reference", "critic"),
    ) -> None:
        if ranks is not ALONE:  # a head in shards is whole inside the model's own forward alone
            model = model.model_copy(update={"fused_head": "never"})
        self.model = model
        self.ranks = ranks
        self.device = device_of(model)
        self.temperature = temperature
        self._policy: Learner | None = None
        self.reference: nn.Module | None = None
        self.critic: Learner | None = None
        needs_reference = "reference" in roles and "ref_log_probs" in algorithm.needs
        if needs_reference and (model.reference or model.lora is None or "actor" not in roles):
            reference = load_causal_lm(model.reference or model.path, model)
            self.reference = ranks.shard(reference.requires_grad_(False))
        if "actor" in roles:
            policy = adapt(load_causal_lm(model.path, model), model.lora)
            self.context_window = int(getattr(policy.config, "max_position_embeddings", 2**31))
            self._policy = Learner(ranks.shard(policy), optimizer, updates)
            if needs_reference and self.reference is None:
                self.reference = self.policy.module  # whose adapters are turned off
        if "critic" in roles and "values" in algorithm.needs:
            module = ranks.shard(adapt(load_critic(model.critic or model.path, model), model.lora))
            self.critic = Learner(module, critic_optimizer or optimizer, critic_updates or updates)

    @property
    def policy(self) -> Learner:
        if self._policy is None:
            raise ValueError("no policy was loaded: this pool has other roles")
        return self._policy

    def log_probs(self, batch: DataProto, *, reference: bool = False, temperature: float | None = None) -> Tensor:
        """At the temperature that is sampled at, or another."""
        model = self.reference if reference else self.policy.module
        if model is None:
            raise ValueError("no reference model was loaded: the algorithm's signatures did not ask for ref_log_probs")

        t = self.temperature if temperature is None else temperature

        def forward(part: dict[str, Tensor]) -> Tensor:
            return token_scores(model, part, temperature=t, wanted=["log_probs"])["log_probs"]

        with adapters_off(model) if reference else nullcontext():
            return self._each_token(batch, forward, model)

    def entropies(self, batch: DataProto) -> Tensor:
        model = self.policy.module

        def forward(part: dict[str, Tensor]) -> Tensor:
            return token_scores(model, part, temperature=self.temperature, wanted=["entropies"])["entropies"]

        return self._each_token(batch, forward, model)

    def values(self, batch: DataProto) -> Tensor:
        critic = self._critic().module
        return self._each_token(batch, lambda part: response_values(critic, part).float(), critic)

    def update(self, batch: DataProto, algorithm: Algorithm, totals: Totals) -> UpdateReport:
        """One optimizer step; loss and metrics are this rank's part of the step's."""
        model, temperature = self.policy.module, self.temperature
        head = head_of(model)
        if head is not None and not is_token_wise(algorithm, dict(batch.batch.items())):
            head = None
        bounds = {k: v for k, v in algorithm.policy_loss.hyperparameters.items() if k in ("clip_low", "clip_high")}

        def forward(part: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
            weights = None if head is None else token_weights(algorithm, part)
            if head is not None and weights is not None:
                loss, scores = fused_objective(model, head, part, algorithm, weights, temperature=temperature)
            else:
                scores = token_scores(
                    model,
                    part,
                    temperature=temperature,
                    wanted=["log_probs", "entropies"],
                    entropy_gradient="entropies" in algorithm.loss_needs,
                )
                loss = policy_objective(algorithm, {**part, **scores})
            log_probs, entropies = scores["log_probs"], scores["entropies"]
            mask = part["response_mask"]
            metrics: Metrics = {"entropy": diagnostics.token_mean(entropies, mask)}
            if "old_log_probs" in part:
                old, advantages = part["old_log_probs"], part["advantages"]
                metrics |= diagnostics.policy_update(log_probs, old, advantages, mask, **bounds)
            return loss, metrics

        return self._learn(self.policy, batch, totals, forward)

    def update_critic(self, batch: DataProto, algorithm: Algorithm, totals: Totals) -> UpdateReport:
        critic = self._critic()

        def forward(part: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
            return value_objective(algorithm, {**part, "new_values": response_values(critic.module, part).float()}), {}

        return self._learn(critic, batch, totals, forward)

    def learners(self) -> dict[str, Learner]:
        """What is trained, and so belongs in a checkpoint, by name."""
        learners = {"policy": self._policy, "critic": self.critic}
        return {name: learner for name, learner in learners.items() if learner is not None}

    def _critic(self) -> Learner:
        if self.critic is None:
            raise ValueError("no critic was loaded: the algorithm's signatures did not ask for values")
        return self.critic

    def _parts(self, batch: DataProto, model: nn.Module) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Micro-batches within the token budget, each with its rows, on the device; as many on every rank.

        A rank that has fewer goes on with a row that counts for nothing, and with no rows to answer for.
        """
        tensors = {name: tensor.to(self.device) for name, tensor in batch.batch.items()}
        width, attention = batch["prompts"].shape[1], batch["attention_mask"].bool()
        prompts, responses = attention[:, :width].sum(-1).tolist(), attention[:, width:].sum(-1).tolist()
        budget = token_budget(self.model, model, max(map(operator.add, prompts, responses), default=1))
        if packs(model):
            ids = torch.where(attention[:, :width], batch["prompts"], -1)
            same = torch.unique(ids, dim=0, return_inverse=True)[1].tolist() if len(batch) else []
            parts = micro_batches_of_groups(same, prompts, responses, max_tokens=budget)
        else:
            parts = micro_batches(prompts, responses, max_tokens=budget)
        # Before any forward, in which the ranks wait for each other.
        spares = self.ranks.largest(len(parts)) - len(parts)
        for rows in parts:
            yield rows, trimmed(tensors, rows)
        for _ in range(spares):
            spare = trimmed(tensors, [0])
            yield [], {**spare, "response_mask": torch.zeros_like(spare["response_mask"])}

    @torch.no_grad()
    def _each_token(self, batch: DataProto, forward: Callable[[dict[str, Tensor]], Tensor], model: nn.Module) -> Tensor:
        result = torch.zeros(batch["response_mask"].shape)
        with packing(model):
            for rows, part in self._parts(batch, model):
                x = torch.where(part["response_mask"], forward(part), 0.0)
                if rows:
                    result[rows, : x.shape[1]] = x.cpu()
        return result

    def _learn(
        self,
        learner: Learner,
        batch: DataProto,
        totals: Totals,
        forward: Callable[[dict[str, Tensor]], tuple[Tensor, Metrics]],
    ) -> UpdateReport:
        loss, metrics = 0.0, dict[str, Metric]()
        learner.optimizer.zero_grad(set_to_none=True)  # an exception in the last step may have left some
        with packing(learner.module):
            for _, part in self._parts(batch, learner.module):
                part_loss, part_metrics = forward({**part, "totals": totals})  # type: ignore[dict-item]
                # Ranks average their gradients; the totals are the whole step's, so their sum is meant.
                (part_loss * self.ranks.size).backward()  # type: ignore[no-untyped-call]
                loss += float(part_loss.detach())
                metrics = merge_metrics(metrics, part_metrics)
        norm, lr, skipped = learner.step()
        return UpdateReport(loss, norm, lr, skipped, metrics)
