"""The common code of both trainers: private methods of TRL's trainers, overridden to use an algorithm."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlprims import algorithms
from rlprims.algorithms import Algorithm
from rlprims.diagnostics import mean_over_tokens, ratio_stats
from rlprims.types import Metrics, Totals

from ._settings import Settings, contradictions

_LOSS_DATA = frozenset(
    {"log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "entropies", "advantages", "response_mask"}
    | {"losses", "totals"}
)
_BEFORE_THE_LOSS = ("score_shaping", "advantage", "normalization")
_TRAINER: Any = object  # in its place is TRL's class when a trainer is made, so that self and super() have its names


class Hooks(_TRAINER):  # type: ignore[misc]
    """Methods that override those of TRL's class; this class is first in the method resolution order."""

    settings: ClassVar[Settings]
    """The settings of TRL that the algorithm has too."""
    scored: ClassVar = frozenset(
        {"scores", "component_scores", "rewards", "advantages", "group_ids", "valid_rows", "response_mask"}
    )
    """The columns that exist before the loss."""
    algorithm: Algorithm
    _rewards: Tensor

    @classmethod
    def problems(cls, algorithm: Algorithm) -> list[str]:
        """The stages and data of the algorithm that the trainer does not support."""
        problems = []
        for stage, part in algorithm.uses():
            available = cls.scored if stage.split(".")[0] in _BEFORE_THE_LOSS else _LOSS_DATA
            if stage not in ("filter", "kl_in_reward") and (missing := sorted(part.needs - available)):
                problems.append(f"{part.path} reads {', '.join(missing)}, which TRL does not have there")
        for i, term in enumerate(algorithm.loss_terms):
            if term.controller is not None:
                problems.append(f"loss_terms.{i}.coefficient is {term.controller}, whose state TRL does not save")
            if not term.is_beside_the_policy:
                problems.append(f"loss_terms.{i} is on {term.mask} with a separate mean, for which TRL has no counts")
        if algorithm.filter is not None:
            problems.append("a filter needs dynamic sampling, which TRL does not have: use replace(filter=None)")
        return problems

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        name = self.algorithm.name
        if problems := contradictions(self.settings, self.algorithm, self.args):
            what = "these settings of the configuration contradict the algorithm, which determines the computation:"
            raise ValueError("\n".join([what, *problems]))
        if self.aux_loss_enabled:
            raise ValueError(f"{name} has no router_aux_loss_coef: set it to 0")
        if self.use_vllm and (problem := self._vllm_problem()):
            raise ValueError(f"{name} {problem}")

    def _vllm_problem(self) -> str | None:
        """The reason why the algorithm cannot use vLLM's samples, or None."""
        raise NotImplementedError  # the trainer of GRPO and that of RLOO have their own

    def _calculate_rewards(self, *args: Any) -> Tensor:
        self._rewards = super()._calculate_rewards(*args)
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = self._sample(inputs)
        return output | {"advantages": self._advantages(output)}

    def _sample(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        return output

    def _advantages(self, output: Mapping[str, Any]) -> Tensor:
        """The advantages of this process's rows, computed from the whole batch of all processes."""
        mask = sampled_mask(output)
        scorable = ~self._rewards.isnan().all(1)
        rewards = self._rewards.nan_to_num(0.0)
        first = torch.arange(mask.shape[1], device=mask.device) == 0
        samples = self.num_generations if self.model.training else self.num_generations_eval
        data = {
            **dict(zip(self.reward_func_names, rewards.unbind(1), strict=True)),
            "scores": rewards @ self.reward_weights.to(rewards.device),
            "group_ids": torch.arange(len(rewards), device=rewards.device) // samples,
            "valid_rows": scorable,
            # The score of a fully masked response is still in its baseline, so it gets one token.
            "response_mask": self._gather(mask | (first & ~mask.any(1, keepdim=True))) & scorable[:, None],
        }
        for name, trl_name in (("old_log_probs", "old_per_token_logps"), ("ref_log_probs", "ref_per_token_logps")):
            if name in self.scored and trl_name in output:
                data[name] = self._gather(torch.where(mask, output[trl_name], 0.0))
        data |= algorithms.component_scores(self.algorithm, data)
        data |= algorithms.shape_scores(self.algorithm, data)
        kl = self.algorithm.kl_in_reward
        kl_coef = kl.controller.hyperparameters["kl_coef"] if kl else 0.0
        advantages = algorithms.estimate_advantages(self.algorithm, data, kl_coef=kl_coef)["advantages"]
        means = (advantages.sum(1) / data["response_mask"].sum(1).clamp(min=1)).tolist()
        logged = self._logs["advantages"]  # the table of completions, which has TRL's
        for _ in range(min(len(means), len(logged))):
            logged.pop()
        logged.extend(means)
        own = self.accelerator.process_index * len(mask)
        return advantages[own : own + len(mask), : mask.shape[1]]

    def _gather(self, rows: Tensor) -> Tensor:
        gathered: Tensor = self.accelerator.gather(self.accelerator.pad_across_processes(rows, dim=1))
        return gathered

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mask = sampled_mask(inputs)
        log_probs, entropies, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            mask.shape[1],
            compute_entropy=True,
            **{name: inputs[name] for name in _MODEL_INPUTS if name in inputs},
        )
        old = inputs.get("old_per_token_logps", log_probs.detach())
        sampled = inputs.get("sampling_per_token_logps", old)
        data = {
            "log_probs": log_probs,
            "old_log_probs": old,
            "rollout_log_probs": torch.where(sampled.isnan(), old, sampled),
            "advantages": inputs["advantages"],
            "response_mask": mask,
            "entropies": entropies,
            "totals": self._totals(inputs, mask),
        }
        if "ref_per_token_logps" in inputs:
            data["ref_log_probs"] = inputs["ref_per_token_logps"]
        bounds = {name: self.algorithm.policy_loss.hyperparameters.get(name) for name in ("clip_low", "clip_high")}
        self._log(ratio_stats(log_probs, old, data["advantages"], mask, **bounds))
        self._log({"entropy": mean_over_tokens(entropies.detach(), mask)})
        return algorithms.policy_objective(self.algorithm, data | algorithms.token_weights(self.algorithm, data))

    def _totals(self, inputs: Mapping[str, Any], mask: Tensor) -> Totals:
        """The totals of one optimizer step as TRL counts them, per process, because gradients are averaged over these.

        Tokens are the mean over the steps of one generation. A response without a token counts as a sequence.
        """
        tokens, sequences = inputs["num_items_in_batch"] / self.accelerator.num_processes, len(mask)
        if self.model.training:
            micro_batches = self.current_gradient_accumulation_steps
            tokens, sequences = tokens * micro_batches / self.args.steps_per_generation, sequences * micro_batches
        return Totals(tokens=tokens, sequences=sequences, groups=0)

    def _log(self, metrics: Metrics) -> None:
        mode = "train" if self.model.training else "eval"
        for name, metric in metrics.items():
            self._metrics[mode][name].append(self.accelerator.gather(metric.value()).mean().item())


def sampled_mask(batch: Mapping[str, Any]) -> Tensor:
    """True on the tokens that the policy sampled; False on padding and tool output."""
    mask: Tensor = batch["completion_mask"].bool()
    return mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask


_MODEL_INPUTS = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)
