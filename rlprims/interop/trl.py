"""rlprims inside TRL's trainers: an :class:`Algorithm` for the advantages and the loss, verifiers as reward functions.

TRL keeps everything else: generation, reward functions, batches, accumulation, optimizer, logs. Written for TRL 1.16,
whose private hooks are overridden. The import needs no TRL.
"""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlprims.algorithms import (
    Algorithm,
    component_scores,
    estimate_advantages,
    policy_objective,
    shape_scores,
    weigh_tokens,
)
from rlprims.diagnostics import policy_update, token_mean
from rlprims.rewards.scoring import naive
from rlprims.types import Metrics, Totals

__all__ = ["grpo_trainer", "reward_func"]


def grpo_trainer(algorithm: Algorithm, base: Any = None) -> Any:
    """``trl.GRPOTrainer``, or your subclass of it, with the advantages and the loss of ``algorithm``.

    ``GRPOTrainer = grpo_trainer(algorithms.dapo(dialect="trl-1.16"))`` is the one line to change. Of the configuration,
    what says how to run holds (``num_generations``, ``num_iterations``, batch sizes, ``reward_weights``,
    ``mask_truncated_completions``); what says what to compute is not read: ``loss_type``, ``epsilon``,
    ``epsilon_high``, ``delta``, ``scale_rewards``, ``importance_sampling_level``, ``multi_objective_aggregation``,
    ``top_entropy_quantile``, ``off_policy_mask_threshold``, ``entropy_coef``, and the value of ``beta``: any but 0
    makes TRL compute the reference's log-probs.

    Raises:
        ImportError: TRL is not installed.
        ValueError: the algorithm reads what TRL does not have, or has a filter; and when a trainer is made, a
            configuration that does not go with it.
    """
    _check(algorithm)
    if base is None:
        base = _trl().GRPOTrainer
    return type("GRPOTrainer", (_Hooks, base), {"algorithm": algorithm})


def reward_func(
    verifier: Callable[..., Any], *, answer: str = "answer", **options: Any
) -> Callable[..., list[float | None]]:
    """A verifier as one of TRL's ``reward_funcs``; ``answer`` is the dataset's column with the answers.

    Further columns that the verifier names come from the dataset. A row on which it fails has no score, None, which
    TRL leaves out of the baseline. Numbers beside the score are logged as ``<verifier>/<name>``.

    >>> from rlprims.rewards import verifiers
    >>> score = reward_func(verifiers.gsm8k)
    >>> score(prompts=["6*12="] * 2, completions=["#### 72", "71"], answer=["72", "72"])
    [1.0, 0.0]
    """

    def scores(
        prompts: Sequence[Any], completions: Sequence[Any], log_metric: Any = None, **columns: Any
    ) -> list[float | None]:
        if answer not in columns:
            raise ValueError(f"the dataset has no column {answer!r} with the answers: name it in reward_func(answer=)")
        rows = {name: values for name, values in columns.items() if isinstance(values, list)}
        scored = naive(verifier, [_text(completion) for completion in completions], rows[answer], rows, **options)
        if log_metric is not None:
            for name, column in scored.columns.items():
                log_metric(f"{scores.__name__}/{name}", float(column.nanmean()))
        return [None if math.isnan(score) else score for score in scored.scores.tolist()]

    scores.__name__ = getattr(verifier, "__name__", "verifier")
    return scores


def _text(completion: Any) -> str:
    """Of a conversation, what was said last."""
    return str(completion if isinstance(completion, str) else completion[-1]["content"])


_SCORED = frozenset({"scores", "component_scores", "rewards", "advantages", "group_ids", "valid_rows", "response_mask"})
_TRAINED = frozenset(
    {"log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "entropies", "advantages", "response_mask"}
    | {"losses", "totals"}
)
_BEFORE_THE_LOSS = ("score_shaping", "advantage", "normalization")


def _check(algorithm: Algorithm) -> None:
    problems = []
    for stage, part in algorithm.uses():
        handed = _SCORED if stage.split(".")[0] in _BEFORE_THE_LOSS else _TRAINED
        if stage not in ("filter", "kl_in_reward") and (lacking := sorted(part.needs - handed)):
            problems.append(f"{part.path} reads {', '.join(lacking)}, which TRL does not have there")
    if algorithm.filter is not None:
        problems.append("a filter needs dynamic sampling, which TRL does not have: take replace(filter=None)")
    if algorithm.kl_in_reward is not None:
        problems.append("kl_in_reward needs log-probs before the update, which TRL does not have: take a loss term")
    if problems:
        raise ValueError(f"TRL's trainer cannot run {algorithm.name}: {'; '.join(problems)}")


class _Hooks:
    """Before TRL's own class in the order of resolution."""

    algorithm: Algorithm
    _rewards: Tensor

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        trainer: Any = self
        name = self.algorithm.name
        if "ref_log_probs" in self.algorithm.needs and trainer.beta == 0.0:
            raise ValueError(f"{name} reads ref_log_probs: give GRPOConfig(beta=1.0); any value but 0 will do")
        if trainer.aux_loss_enabled:
            raise ValueError(f"{name} has no router_aux_loss_coef: set it to 0")
        own = self.algorithm.corrections or "rollout_log_probs" in self.algorithm.needs
        if trainer.use_vllm and trainer.vllm_importance_sampling_correction and not own:
            raise ValueError(
                f"{name} corrects nothing: replace(corrections=(use(corrections.tis),)) does what TRL does to vLLM's "
                "samples; or set vllm_importance_sampling_correction=False"
            )

    def _calculate_rewards(self, *args: Any) -> Tensor:
        trainer: Any = super()
        self._rewards = trainer._calculate_rewards(*args)
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        trainer: Any = super()
        output: dict[str, Any] = trainer._generate_and_score_completions(inputs)
        return output | {"advantages": self._advantages(_mask(output))}

    def _advantages(self, mask: Tensor) -> Tensor:
        """Of the whole batch, over all processes; then this one's rows."""
        trainer: Any = self
        accelerator = trainer.accelerator
        scorable = ~self._rewards.isnan().all(1)
        rewards = self._rewards.nan_to_num(0.0)
        samples = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        data = {
            **dict(zip(trainer.reward_func_names, rewards.unbind(1), strict=True)),
            "scores": rewards @ trainer.reward_weights.to(rewards.device),
            "group_ids": torch.arange(len(rewards), device=rewards.device) // samples,
            "valid_rows": scorable,
            "response_mask": accelerator.gather(accelerator.pad_across_processes(_with_tokens(mask), dim=1))
            & scorable[:, None],
        }
        data |= component_scores(self.algorithm, data)
        data |= shape_scores(self.algorithm, data)
        advantages = estimate_advantages(self.algorithm, data)["advantages"]
        self._log_advantages((advantages.sum(1) / data["response_mask"].sum(1).clamp(min=1)).tolist())
        first = accelerator.process_index * len(mask)
        return advantages[first : first + len(mask), : mask.shape[1]]

    def _log_advantages(self, means: list[float]) -> None:
        """In the place of TRL's own, in the table of completions."""
        trainer: Any = self
        logged = trainer._logs["advantages"]
        for _ in range(min(len(means), len(logged))):
            logged.pop()
        logged.extend(means)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        trainer: Any = self
        mask = _mask(inputs)
        log_probs, entropies, _ = trainer._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            mask.shape[1],
            compute_entropy=True,
            **{name: inputs[name] for name in _OF_THE_MODEL if name in inputs},
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
        self._log(policy_update(log_probs, old, data["advantages"], mask, **bounds))
        self._log({"entropy": token_mean(entropies.detach(), mask)})
        return policy_objective(self.algorithm, data | weigh_tokens(self.algorithm, data))

    def _totals(self, inputs: Mapping[str, Any], mask: Tensor) -> Totals:
        """Of one optimizer step, as TRL counts them: this process' share, as the gradients of processes are averaged.

        Tokens are the mean over the steps that one generation serves; a response without a token counts as a sequence.
        """
        trainer: Any = self
        tokens, sequences = inputs["num_items_in_batch"] / trainer.accelerator.num_processes, len(mask)
        if trainer.model.training:
            micro_batches = trainer.current_gradient_accumulation_steps
            tokens, sequences = tokens * micro_batches / trainer.args.steps_per_generation, sequences * micro_batches
        return Totals(tokens=tokens, sequences=sequences, groups=0)

    def _log(self, metrics: Metrics) -> None:
        trainer: Any = self
        mode = "train" if trainer.model.training else "eval"
        for name, metric in metrics.items():
            trainer._metrics[mode][name].append(trainer.accelerator.gather(metric.value()).mean().item())


def _mask(batch: Mapping[str, Any]) -> Tensor:
    """What the policy has sampled: no padding, no tool's answer."""
    mask: Tensor = batch["completion_mask"].bool()
    return mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask


def _with_tokens(mask: Tensor) -> Tensor:
    """A response that TRL masks as a whole still has its score, and its group the baseline: give it one token."""
    first = torch.zeros_like(mask)
    first[:, 0] = True
    return torch.where(mask.any(1, keepdim=True), mask, first)


_OF_THE_MODEL = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


def _trl() -> Any:
    try:
        return importlib.import_module("trl")
    except ImportError as error:
        raise ImportError(f"grpo_trainer needs TRL ({error}): pip install trl") from error
