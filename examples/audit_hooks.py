"""The first step of TRL, verl, OpenRLHF, prime-rl or NeMo-RL, audited: docs/audit.md has the line for each.

Copy this file to a folder of PYTHONPATH. Each hook reads what its trainer has at that place, prints the formulas and
what is wrong, and returns the columns. ``settings`` are those of ``rlprims.audit.report``.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlprims import audit
from rlprims.grouping import dense_ids
from rlprims.layout import unpack
from rlprims.reports.step_page import write_step_page

__all__ = ["TRL", "nemo_rl", "openrlhf", "prime_rl", "tell", "verl"]

Columns = dict[str, Any]


def tell(columns: Columns, page: str | None = None, tokenizer: Any = None, **settings: Any) -> Columns:
    """Print the report of a step, and write its page."""
    report = audit.report(columns, tokenizer=tokenizer, **{"tolerance": 1e-4} | settings)  # trainers have float32
    print(report)
    if page is not None:
        write_step_page(columns, report, Path(page), tokenizer=tokenizer, title=page)
    return columns


class TRL:
    """For TRL 1.16: ``class Audited(TRL, GRPOTrainer)``, or RLOOTrainer. It reads the first optimizer step."""

    audit_page: str | None = None
    _parts: tuple[Columns, ...] = ()
    _inputs: Any = None
    _is_told = False

    def _get_per_token_logps_and_entropies(self, *args: Any, **settings: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **settings)  # type: ignore[misc]
        self._log_probs = found[0]
        return found

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)  # type: ignore[misc]
        if self._log_probs.requires_grad:  # in an evaluation it has none
            self._log_probs.retain_grad()
            self._inputs = inputs
        return loss

    def training_step(self, *args: Any) -> Any:
        loss = super().training_step(*args)  # type: ignore[misc]  # with the backward pass
        if self._inputs is None:
            raise ValueError("the trainer keeps no log-probs: audit a step with use_liger_kernel=False")
        part = _of_trl(self._inputs, self._log_probs)
        part["micro_batches"] = torch.full((len(part["log_probs"]),), len(self._parts))
        self._parts += (part,)
        if len(self._parts) == self.args.gradient_accumulation_steps:  # type: ignore[attr-defined]
            self.audit(_joined(self._parts))
            self._parts = ()
        return loss

    def audit(self, columns: Columns) -> None:
        """What is done with an optimizer step's columns; by default the first are told."""
        if not self._is_told:
            tell(columns, self.audit_page, self.processing_class)  # type: ignore[attr-defined]
        self._is_told = True


def _of_trl(inputs: Mapping[str, Any], log_probs: Tensor) -> Columns:
    names = {"advantages": "advantages", "completion_ids": "responses", "prompt_ids": "prompts"}
    names |= {"old_per_token_logps": "old_log_probs", "ref_per_token_logps": "ref_log_probs"}
    names |= {"sampling_per_token_logps": "rollout_log_probs"}
    columns = {ours: inputs[theirs] for theirs, ours in names.items() if inputs.get(theirs) is not None}
    mask = inputs["completion_mask"]
    columns["response_mask"] = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
    columns["attention_mask"] = torch.cat([inputs["prompt_mask"], mask], 1)
    current = {"log_probs": log_probs.detach(), "gradients": log_probs.grad}
    return {"old_log_probs": log_probs.detach(), **columns, **current}  # on policy TRL keeps no old ones


def verl(data: Any, page: str | None = None, tokenizer: Any = None, **settings: Any) -> Columns:
    """For verl 0.9.1, before ``self._update_actor(batch)`` in ``RayPPOTrainer.fit``: its DataProto."""
    return tell({**dict(data.batch.items()), **data.non_tensor_batch}, page, tokenizer, **settings)


def openrlhf(
    experiences: Iterable[Any], samples_per_prompt: int, page: str | None = None, tokenizer: Any = None, **settings: Any
) -> Columns:
    """For OpenRLHF 0.11.2, after ``experience_maker.make_experience_batch(...)`` in its trainer.

    The log-probs of an Experience are of ``sequences[:, 1:]``, with the prompt; ``index`` counts the samples in the
    order of their prompts.
    """
    names = {"action_mask": "response_mask", "action_log_probs": "old_log_probs", "advantages": "advantages"}
    names |= {"base_action_log_probs": "ref_log_probs", "rollout_log_probs": "rollout_log_probs", "values": "values"}
    names |= {"returns": "returns", "rewards": "scores"}
    parts = []
    for each in experiences:
        part = {ours: getattr(each, theirs) for theirs, ours in names.items() if getattr(each, theirs) is not None}
        part |= {"responses": each.sequences[:, 1:], "attention_mask": each.attention_mask[:, 1:]}
        parts.append(part | {"group_ids": torch.tensor(each.index) // samples_per_prompt})
    return tell(_joined(parts), page, tokenizer, **settings)


def prime_rl(
    micro_batches: Iterable[Any],
    log_probs: Iterable[Tensor] | None = None,
    page: str | None = None,
    tokenizer: Any = None,
    **settings: Any,
) -> Columns:
    """For prime-rl 0.8 (559b4477, trainer/rl/data.py: TensorMicroBatch), after the loop over a step's micro-batches.

    ``log_probs`` are the ``out["logprobs"]`` of each, which the trainer has shifted to their tokens. After
    ``retain_grad`` before the backward pass they have the gradients.
    """
    names = {"input_ids": "responses", "loss_mask": "response_mask", "advantages": "advantages"}
    names |= {"inference_logprobs": "rollout_log_probs", "ref_logprobs": "ref_log_probs"}
    parts = []
    for number, each in enumerate(micro_batches):
        parts.append({ours: each[theirs][0] for theirs, ours in names.items() if each[theirs] is not None})
        lengths = torch.tensor([0, *each["sequence_lengths"]])
        if log_probs is not None:
            current = list(log_probs)[number]
            parts[-1] |= {"log_probs": current.detach()[0]}
            parts[-1] |= {} if current.grad is None else {"gradients": current.grad[0]}
        rows, width = len(lengths) - 1, int(lengths.max())
        parts[-1] = {name: unpack(x.cpu(), lengths.cumsum(0), width) for name, x in parts[-1].items()}
        parts[-1]["micro_batches"] = torch.full((rows,), number)
    return tell(_joined(parts), page, tokenizer, **settings)


def nemo_rl(
    data: Mapping[str, Any],
    rewards: Tensor | None = None,
    prompt_ids: Tensor | None = None,
    page: str | None = None,
    tokenizer: Any = None,
    **settings: Any,
) -> Columns:
    """For NeMo-RL 0.6 (7ea279ab, algorithms/grpo.py), before ``policy.train(train_data, ...)``: its ``train_data``.

    ``rewards`` and ``prompt_ids_for_adv``, which the function has, let the estimator be named. Log-probs that NeMo-RL
    skipped are zeros, and left out.
    """
    names = {"prev_logprobs": "old_log_probs", "generation_logprobs": "rollout_log_probs"}
    names |= {"reference_policy_logprobs": "ref_log_probs", "advantages": "advantages", "input_ids": "responses"}
    columns = {ours: data[theirs] for theirs, ours in names.items() if theirs in data and bool(data[theirs].any())}
    columns["response_mask"] = (data["token_mask"] * data["sample_mask"][:, None]).bool()
    columns["attention_mask"] = torch.arange(data["input_ids"].shape[1]) < data["input_lengths"][:, None]
    columns |= {} if rewards is None else {"scores": rewards}
    columns |= {} if prompt_ids is None else {"group_ids": dense_ids([str(row) for row in prompt_ids.tolist()])}
    return tell(columns, page, tokenizer, **settings)


def _joined(parts: Sequence[Columns]) -> Columns:
    """The rows of all parts; a column is padded on the right to its longest."""

    def column(name: str) -> Tensor:
        each = [part[name] for part in parts]
        width = max(x.shape[-1] for x in each)
        return torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[1])) if x.dim() == 2 else x for x in each])

    return {name: column(name) for name in parts[0]}
