"""The loss of an :class:`Algorithm` for prime-rl, SkyRL, NeMo-RL and slime: docs/interop.md has the settings.

Copy this file to a folder of PYTHONPATH, as every worker imports it: ``from other_trainers import PrimeRL``.
A class raises ``ValueError`` if its trainer does not have the data of the loss, or does not divide by the counts of the
algorithm's mean. The losses of micro-batches and ranks, added as the trainer adds them, are then that of the step.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlprims import losses
from rlprims.algorithms import Algorithm, policy_losses, token_weights
from rlprims.types import Totals

__all__ = ["NeMoRL", "PrimeRL", "SkyRL", "Slime"]

Result = tuple[Tensor, dict[str, Any]]
_ROW_MEANS = (losses.seq_mean_token_mean, losses.seq_mean_token_sum, losses.seq_mean_token_sum_norm)


class _Loss:
    _means: ClassVar[Mapping[Any, str]]  # those whose counts the trainer has, and its names for them
    _policies: ClassVar[tuple[str, ...]] = ("old_log_probs", "rollout_log_probs", "ref_log_probs")

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm, mean, terms = algorithm, algorithm.aggregation, algorithm.loss_terms
        needs = algorithm.loss_needs | algorithm.token_weight_needs
        has = {"log_probs", "advantages", "response_mask", *self._policies}
        if "old_log_probs" not in needs:
            has |= {"rollout_log_probs"}  # a single old policy is the sampler's
        known = [each.__name__ for each in self._means]
        problems = {
            f"it reads {', '.join(sorted(needs - has))}": needs - has,
            f"its mean is {mean}, expected one of {known}": mean.fn not in self._means,
            "it selects tokens of a whole update": algorithm.token_selection or any(term.tokens for term in terms),
            "a term has its own mean or controller": any(x.controller or not x.is_beside_the_policy for x in terms),
        }
        if found := "; ".join(problem for problem, holds in problems.items() if holds):
            raise ValueError(f"{type(self).__name__} cannot compute the loss of {algorithm.name}: {found}")

    def check_settings(self, settings: Any, **wanted: Any) -> None:
        if wrong := {name: value for name, value in wanted.items() if getattr(settings, name) != value}:
            raise ValueError(f"the trainer's settings contradict {self.algorithm.name}, expected {wrong}")

    def per_token(self, *columns: Tensor | None) -> Tensor:
        names = ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "response_mask")
        data: dict[str, Any] = dict(zip((*names, "cu_seqlens"), columns, strict=False))
        return policy_losses(self.algorithm, data | token_weights(self.algorithm, data))


class PrimeRL(_Loss):
    """For ``[trainer.loss] type = "custom"``, ``import_path``: the sum over one sequence, which prime-rl divides."""

    _means: ClassVar = {losses.token_mean: ""}
    _policies = ("old_log_probs", "ref_log_probs")

    def __call__(self, x: Any) -> Any:
        policies = (x.trainer_logprobs, x.inference_logprobs, x.inference_logprobs, x.ref_logprobs)
        columns = (None if each is None else each[None] for each in (*policies, x.advantages, x.loss_mask))
        loss = (self.per_token(*columns) * (1.0 if x.loss_weights is None else x.loss_weights)).sum()
        return _package("prime_rl.trainer.rl.loss", "prime-rl", "PrimeRL").LossOutputs(loss=loss, metrics={})


class SkyRL(_Loss):
    """For ``PolicyLossRegistry.register``: a sum, because SkyRL divides the advantages."""

    _means: ClassVar = {losses.token_mean: "token_mean", losses.seq_mean_token_mean: "sequence_mean"}
    _means |= {losses.seq_mean_token_sum_norm: "seq_mean_token_sum_norm", losses.prompt_token_mean: "prompt_mean"}
    _policies = ("old_log_probs", "rollout_log_probs")

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__(algorithm)
        x, mask = -torch.rand(4, 3, 4, generator=torch.Generator().manual_seed(0)), torch.ones(3, 4, dtype=torch.bool)
        once, twice = (self.per_token(*x[:3], None, scale * (x[3] + 0.5), mask) for scale in (1, 2))
        if not torch.allclose(2 * once, twice, rtol=1e-4):
            raise ValueError(f"SkyRL divides advantages: the loss of {algorithm.name} is not proportional to them")

    def __call__(
        self, new: Tensor, old: Tensor, advantages: Tensor, config: Any, loss_mask: Tensor, rollout_logprobs: Any = None
    ) -> Result:
        wanted = {"off_policy_correction": type(config.off_policy_correction)()}
        if length := self.algorithm.aggregation.hyperparameters.get("length"):
            wanted["max_seq_len"] = length
        self.check_settings(config, loss_reduction=self._means[self.algorithm.aggregation.fn], **wanted)
        return self.per_token(new, old, rollout_logprobs, None, advantages, loss_mask.bool()).sum(), {}


class NeMoRL(_Loss):
    """For ``grpo_train(loss_fn=...)``."""

    _means: ClassVar = dict.fromkeys(_ROW_MEANS, "SEQUENCE_LEVEL") | {losses.token_mean: "TOKEN_LEVEL"}

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__(algorithm)
        names = _package("nemo_rl.algorithms.loss.interfaces", "nemo-rl", "NeMoRL")
        self.input_type = names.LossInputType.LOGPROB
        self.loss_type = names.LossType[self._means[algorithm.aggregation.fn]]
        self.reference_policy_kl_penalty = float("ref_log_probs" in algorithm.loss_needs)  # NeMo-RL then adds a column

    def __call__(self, data: Any, global_valid_seqs: Any, global_valid_toks: Any, next_token_logprobs: Any) -> Result:
        if "curr_logprobs_unfiltered" in data:
            raise ValueError("log_probs are within top_p and top_k, ref_log_probs not: expected top_p 1, top_k null")
        old, sampler, advantages = (data[x][:, 1:] for x in ("prev_logprobs", "generation_logprobs", "advantages"))
        ref = data["reference_policy_logprobs"][:, 1:] if "reference_policy_logprobs" in data else None
        mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:].bool()
        columns = {"response_mask": mask, "totals": Totals(global_valid_toks, global_valid_seqs, groups=0)}
        per_token = self.per_token(next_token_logprobs, old, sampler, ref, advantages, mask)
        loss = self.algorithm.aggregation({"losses": per_token, **columns})
        error = losses.token_mean((sampler - old).abs().exp(), **columns).item()  # grpo_train reads it
        samples = data["sample_mask"].sum().item()
        return loss, {"loss": loss.item(), "token_mult_prob_error": error, "num_valid_samples": samples}


class Slime(_Loss):
    """For ``--loss-type custom_loss --custom-loss-function-path``."""

    _means: ClassVar = {losses.token_mean: "", losses.seq_mean_token_mean: ""}

    def __call__(self, args: Any, batch: Any, logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]) -> Result:
        by_token, kl = self.algorithm.aggregation.fn is losses.token_mean, "ref_log_probs" in self.algorithm.loss_needs
        alone = {"use_rollout_logprobs": False, "use_tis": False, "entropy_coef": 0.0, "context_parallel_size": 1}
        self.check_settings(args, calculate_per_token_loss=by_token, use_kl_loss=kl, **alone)
        slime = _package("slime.backends.megatron_utils.loss", "slime", "Slime")
        columns = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
        columns |= slime.get_rollout_top_p_logprob_kwargs(args, batch)
        new = torch.cat(slime.get_log_probs_and_entropy(logits, args=args, **columns)[1]["log_probs"])
        names = ("log_probs", "rollout_log_probs", "ref_log_probs")
        old, sampler, ref = (torch.cat(batch[name]) if batch.get(name) else None for name in names)
        advantages, mask = torch.cat(batch["advantages"]), torch.cat(batch["loss_masks"]).bool()
        cu_seqlens = torch.tensor([0, *batch["response_lengths"]], device=new.device).cumsum(0)
        old = new.detach() if old is None else old
        loss = sum_of_sample_mean(self.per_token(new, old, sampler, ref, advantages, mask, cu_seqlens))
        return loss, {"loss": loss.detach()}


def _package(module: str, name: str, user: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{user} needs {name} ({error}): pip install {name}") from error
