"""See :class:`LocalExecution`."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlprims import diagnostics
from rlprims.algorithms import Algorithm, policy_objective, value_objective
from rlprims.batching import micro_batches
from rlprims.data_proto import DataProto
from rlprims.execution._config import ModelConfig, OptimizerConfig, Sampling
from rlprims.execution._protocol import UpdateReport
from rlprims.execution.local._learner import Learner
from rlprims.execution.local._models import load_causal_lm, load_critic, response_logits, response_values, trimmed
from rlprims.execution.local._sampler import sample, uniforms
from rlprims.logprobs import entropy_from_logits, from_logits
from rlprims.losses import count_totals
from rlprims.types import Metric, Metrics, merge_metrics


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
        policy = load_causal_lm(model.path, model)
        self.model = model
        self.device = next(policy.parameters()).device
        self.temperature = temperature
        self.tokenizer = tokenizer
        self.policy = Learner(policy, optimizer, updates)
        self.context_window = int(getattr(policy.config, "max_position_embeddings", 2**31))
        self.pad_token_id, self.end_ids = _special_ids(policy, tokenizer)
        self.reference: nn.Module | None = None
        if "ref_log_probs" in algorithm.needs:
            reference = load_causal_lm(model.reference, model) if model.reference else copy.deepcopy(policy)
            self.reference = reference.requires_grad_(False)
        self.critic: Learner | None = None
        if "values" in algorithm.needs:
            module = load_critic(model.critic or model.path, model)
            self.critic = Learner(module, critic_optimizer or optimizer, critic_updates or updates)

    def generate(self, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int) -> DataProto:
        ids: list[list[int]] = [list(row) for row in prompts["prompt_ids"]]
        width = max(map(len, ids), default=0)
        if width > prompt_width:
            raise ValueError(f"a prompt has {width} tokens, more than prompt_width={prompt_width}: raise the width")
        padded = torch.full((len(ids), width), self.pad_token_id, dtype=torch.int64)
        mask = torch.zeros(len(ids), width, dtype=torch.bool)
        for i, row in enumerate(ids):
            padded[i, width - len(row) :] = torch.tensor(row, dtype=torch.int64)
            mask[i, width - len(row) :] = True
        u = uniforms(seed, prompts["sample_id"].tolist(), sampling.max_new_tokens)
        at_once = self.model.max_rows_per_generation
        parts = [
            sample(
                self.policy.module,
                padded[rows].to(self.device),
                mask[rows].to(self.device),
                sampling,
                u=u[rows],
                end_ids=self.end_ids,
                pad_id=self.pad_token_id,
                ends_text=self._ends_text(sampling),
            )
            for rows in (slice(start, start + at_once) for start in range(0, max(1, len(ids)), at_once))
        ]
        tokens, response_mask, log_probs, truncated = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
        padded = nn.functional.pad(padded, (prompt_width - width, 0), value=self.pad_token_id)
        mask = nn.functional.pad(mask, (prompt_width - width, 0), value=False)
        sampled = DataProto.from_dict(
            tensors={
                "prompts": padded,
                "responses": tokens,
                "attention_mask": torch.cat([mask, response_mask], 1),
                "response_mask": response_mask,
                "rollout_log_probs": log_probs,
                "truncated": truncated,
            }
        )
        return prompts.union(sampled)

    def log_probs(self, batch: DataProto, *, reference: bool = False) -> Tensor:
        model = self.reference if reference else self.policy.module
        if model is None:
            raise ValueError("no reference model was loaded: the algorithm's signatures did not ask for ref_log_probs")

        def forward(part: dict[str, Tensor]) -> Tensor:
            return from_logits(response_logits(model, part), part["responses"], temperature=self.temperature)

        return self._each_token(batch, forward)

    def values(self, batch: DataProto) -> Tensor:
        critic = self._critic().module
        return self._each_token(batch, lambda part: response_values(critic, part).float())

    def update(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        needs_entropy_gradient = "entropies" in algorithm.needs
        bounds = {k: v for k, v in algorithm.policy_loss.hyperparameters.items() if k in ("clip_low", "clip_high")}

        def forward(part: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
            logits = response_logits(self.policy.module, part)
            log_probs = from_logits(logits, part["responses"], temperature=self.temperature)
            with torch.set_grad_enabled(needs_entropy_gradient):
                entropies = entropy_from_logits(logits, temperature=self.temperature)
            loss = policy_objective(algorithm, {**part, "log_probs": log_probs, "entropies": entropies})
            mask = part["response_mask"]
            metrics: Metrics = {"entropy": diagnostics.token_mean(entropies, mask)}
            if "old_log_probs" in part:
                old, advantages = part["old_log_probs"], part["advantages"]
                metrics |= diagnostics.policy_update(log_probs, old, advantages, mask, **bounds)
            return loss, metrics

        return self._learn(self.policy, batch, forward)

    def update_critic(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        critic = self._critic()

        def forward(part: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
            return value_objective(algorithm, {**part, "new_values": response_values(critic.module, part).float()}), {}

        return self._learn(critic, batch, forward)

    def sync_weights(self) -> None:
        """The sampler reads the trained weights themselves."""

    def save(self, directory: Path) -> None:
        self.policy.save(directory, "policy")
        self.tokenizer.save_pretrained(directory / "policy")
        if self.critic is not None:
            self.critic.save(directory, "critic")

    def load(self, directory: Path) -> None:
        self.policy.load(directory, "policy")
        if self.critic is not None:
            self.critic.load(directory, "critic")

    def _critic(self) -> Learner:
        if self.critic is None:
            raise ValueError("no critic was loaded: the algorithm's signatures did not ask for values")
        return self.critic

    def _parts(self, batch: DataProto) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Micro-batches within the token budget, each with its rows, on the device."""
        tensors = {name: tensor.to(self.device) for name, tensor in batch.batch.items()}
        width, attention = batch["prompts"].shape[1], batch["attention_mask"]
        prompts, responses = attention[:, :width].sum(-1).tolist(), attention[:, width:].sum(-1).tolist()
        for rows in micro_batches(prompts, responses, max_tokens=self.model.max_tokens_per_micro_batch):
            yield rows, trimmed(tensors, rows)

    @torch.no_grad()
    def _each_token(self, batch: DataProto, forward: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
        result = torch.zeros(batch["response_mask"].shape)
        for rows, part in self._parts(batch):
            x = torch.where(part["response_mask"], forward(part), 0.0)
            result[rows, : x.shape[1]] = x.cpu()
        return result

    def _learn(
        self,
        learner: Learner,
        batch: DataProto,
        forward: Callable[[dict[str, Tensor]], tuple[Tensor, Metrics]],
    ) -> UpdateReport:
        mask, group_ids = batch["response_mask"], batch["group_ids"]
        lengths = mask.sum(-1)
        group_tokens = torch.zeros_like(lengths).index_add(0, group_ids, lengths)[group_ids]
        totals = count_totals(mask, group_ids=group_ids)
        loss, metrics = 0.0, dict[str, Metric]()
        learner.optimizer.zero_grad(set_to_none=True)  # an exception in the last step may have left some
        whole = batch.union(DataProto.from_dict(tensors={"group_tokens": group_tokens}))
        for _, part in self._parts(whole):
            part_loss, part_metrics = forward({**part, "totals": totals})  # type: ignore[dict-item]
            part_loss.backward()  # type: ignore[no-untyped-call]
            loss += float(part_loss.detach())
            metrics = merge_metrics(metrics, part_metrics)
        norm, lr, skipped = learner.step()
        return UpdateReport(loss, norm, lr, skipped, metrics)

    def _ends_text(self, sampling: Sampling) -> Callable[[list[int]], bool] | None:
        if not sampling.stop:
            return None
        longest = max(map(len, sampling.stop))

        def ends(tokens: list[int]) -> bool:
            # A token is at least a byte, so the last `longest` tokens hold any stop text that the newest one completes.
            text = self.tokenizer.decode(tokens[-4 * longest :])
            return any(stop in text for stop in sampling.stop)

        return ends


def _special_ids(policy: nn.Module, tokenizer: Any) -> tuple[int, Tensor]:
    settings: Any = policy.generation_config
    ends = settings.eos_token_id if settings.eos_token_id is not None else tokenizer.eos_token_id
    if ends is None:
        raise ValueError("the model has no end-of-sequence token: set eos_token_id in its generation_config.json")
    ends = ends if isinstance(ends, list) else [ends]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
    return pad, torch.tensor(ends, device=next(policy.parameters()).device)
