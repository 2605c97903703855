"""TRL's GRPO and RLOO trainers with the advantages and the loss of an algorithm.

TRL does everything else: generation, reward functions, batches, accumulation, optimizer, logs. Written for TRL 1.16,
whose private methods are overridden. Copy this folder beside your script::

    from trl_trainers import grpo_trainer
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from rlprims import algorithms
from rlprims.algorithms import Algorithm
from rlprims.controllers import FixedKL

from ._hooks import Hooks, sampled_mask
from ._rewards import reward_func
from ._settings import GRPO, RLOO

__all__ = ["grpo_trainer", "reward_func", "rloo_trainer"]


def grpo_trainer(algorithm: Algorithm, base: Any = None) -> Any:
    """``trl.GRPOTrainer``, or your subclass of it, with the advantages and the loss of ``algorithm``.

    ``GRPOTrainer = grpo_trainer(algorithms.dapo(dialect="trl-1.16"))`` is the only line to change. Settings of the run
    keep their meaning (``num_generations``, ``num_iterations``, batch sizes, ``reward_weights``,
    ``mask_truncated_completions``). The algorithm determines the computation: its settings in the configuration
    (``beta``, ``epsilon``, ``loss_type``, ``scale_rewards``, ...) must have TRL's default or the algorithm's value.
    ``beta`` must always have the algorithm's value, the KL's coefficient (0 without KL): TRL loads the reference by it.

    Raises:
        ImportError: TRL is not installed.
        ValueError: the algorithm needs data that TRL does not have, or has a filter; and, when a trainer is made, a
            configuration that contradicts the algorithm, with a fix for each setting.
    """
    return _trainer("GRPOTrainer", _GRPOHooks, algorithm, base)


def rloo_trainer(algorithm: Algorithm, base: Any = None) -> Any:
    """``trl.RLOOTrainer``, or your subclass of it, with the advantages and the loss of ``algorithm``.

    ``RLOOTrainer = rloo_trainer(algorithms.rloo(dialect="trl-1.16"))``, as for :func:`grpo_trainer`. This trainer has
    the log-probs of policy and reference before the update, so ``kl_in_reward`` works too, with a fixed coefficient,
    TRL's ``beta`` (0.05 by default). It raises the same errors.
    """
    return _trainer("RLOOTrainer", _RLOOHooks, algorithm, base)


def _trainer(name: str, hooks: type[Hooks], algorithm: Algorithm, base: Any) -> Any:
    algorithms.check(algorithm)
    problems = hooks.problems(algorithm)
    if problems:
        raise ValueError(f"TRL's trainer cannot run {algorithm.name}: {'; '.join(problems)}")
    if base is None:
        base = getattr(importlib.import_module("trl"), name)
    return type(name, (hooks, base), {"algorithm": algorithm})


class _GRPOHooks(Hooks):
    settings = GRPO

    @classmethod
    def problems(cls, algorithm: Algorithm) -> list[str]:
        problems = super().problems(algorithm)
        if algorithm.kl_in_reward is not None:
            needs = "kl_in_reward needs log-probs before the update, which this trainer does not have"
            problems.append(f"{needs}: use a loss term, or rloo_trainer")
        return problems

    def _vllm_problem(self) -> str | None:
        corrects = self.algorithm.corrections or "rollout_log_probs" in self.algorithm.needs
        if not self.vllm_importance_sampling_correction or corrects:
            return None
        return (
            "has no correction for vLLM's samples: use replace(corrections=(use(corrections.tis),)), as TRL does, or "
            "set vllm_importance_sampling_correction=False"
        )


class _RLOOHooks(Hooks):
    """TRL stores the log-probs of whole responses only, so those of tokens are recorded when TRL computes them."""

    settings = RLOO
    scored = Hooks.scored | {"old_log_probs", "ref_log_probs"}
    _seen: list[Tensor] | None = None

    @classmethod
    def problems(cls, algorithm: Algorithm) -> list[str]:
        problems = super().problems(algorithm)
        kl = algorithm.kl_in_reward
        if kl is not None and kl.controller.fn is not FixedKL:
            problems.append("TRL's checkpoints cannot save an adaptive coefficient: use controllers.FixedKL")
        return problems

    def _vllm_problem(self) -> str | None:
        reads = "rollout_log_probs" in self.algorithm.needs
        return "reads rollout_log_probs, which this trainer does not keep for vLLM's samples" if reads else None

    def _get_per_token_logps_and_entropies(self, *args: Any, **settings: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **settings)
        if self._seen is not None:
            self._seen.append(found[0])
        return found

    def _sample(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._seen = []
        output = super()._sample(inputs)
        names = ("old_per_token_logps", "ref_per_token_logps")
        output |= dict(zip(names, self._seen, strict=False))  # of the reference only if TRL has one
        self._seen = None
        return output | {"num_items_in_batch": self.accelerator.gather(sampled_mask(output).sum()).sum()}

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The loss multiplied by the number of micro-batches, because the Trainer divides it by this number."""
        accumulated = self.current_gradient_accumulation_steps if self.model.training else 1
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        return loss * accumulated
