"""Whether sampler and trainer have the same numbers: compared in a run's first step, and bounded in the others."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlprims.data_proto import DataProto
from rlprims.execution import Execution
from rlprims.runs.steps import StepResult
from rlprims.trainer.config import Config

_LEAST_ESS = 0.9


def disagreements(config: Config, execution: Execution, batch: DataProto) -> Iterator[str]:
    """Score a row alone by the model's own forward pass; compare it with its micro-batch and with the sampler.

    Yields what rounding does not explain, and what to try. The row is the one that differs most from the sampler; if
    none does, the shortest, which has the most padding. Eight rows are scored if the trainer has not scored the batch.
    """
    from transformers import AutoConfig

    from rlprims.execution.hf._families import packs

    model, limit, sampled = config.model.here(weights=False), 2 * execution.tolerance, batch["rollout_log_probs"]
    together: Tensor = batch.batch.get("old_log_probs", sampled)
    if torch.equal(together, sampled):
        batch, sampled = batch[:8], sampled[:8]
        together = execution.log_probs(batch)
    mask = batch["response_mask"]
    is_new = (batch["weights_version"] == execution.weights_version) & (config.replay is None)
    apart = torch.where(is_new, _rms(together - sampled, mask), 0.0)
    lengths = batch["attention_mask"].sum(-1) + 2**31 * ~mask.any(-1)
    row = int(lengths.argmin() if apart.max() <= limit else apart.argmax())
    one = slice(row, row + 1)
    alone = execution.log_probs(batch[one], plain=True)
    is_packed = packs(model)
    path = ("packed" if is_packed else "padded") + " micro-batch" + " with fused head" * model.fused_head
    wide = ["model.packing: false"] * is_packed + ["model.fused_head: false"] * model.fused_head
    on_vllm = config.execution == "ray" and config.ray.engine == "vllm"
    for what, other, remedy in (
        (f"a {path}", together, " or ".join(wide) or "model.max_tokens_per_micro_batch: that of one row"),
        ("the sampler", sampled, "ray.engine: hf" if on_vllm else "model.max_rows_per_generation: 1"),
    ):
        size = float(_rms(other[one] - alone, mask[one]))
        if not size <= limit and (other is together or is_new[row]):
            kind = AutoConfig.from_pretrained(model.path).model_type
            yield (
                f"{kind}: log-probs of a row in {what} and alone differ by {size:.3g} nats (root mean square of its "
                f"tokens); rounding in {model.dtype} explains {limit:g}: try {remedy}"
            )


class Bounds:
    """A hook that warns when the mismatch of a step crosses its bounds, or ends the run."""

    def __init__(self, config: Config, console: Any) -> None:
        self.config, self.console, self.is_beyond = config, console, False

    def __call__(self, trainer: Any, step: StepResult) -> None:
        metrics, versions, most = step.metrics, step.batch["weights_version"], 20 * trainer.execution.tolerance
        age = metrics["staleness_max"]
        found = list[str]()
        if versions.max() == versions.min() + age and not metrics.get("mismatch_max", 0.0) <= most:
            found.append(f"mismatch_max is {metrics['mismatch_max']:.3g} nats, more than {most:g}")
        if age == 0 and not metrics.get("mismatch_ess", 1.0) >= _LEAST_ESS:
            found.append(f"mismatch_ess is {metrics['mismatch_ess']:.3g}, less than {_LEAST_ESS}")
        text = f"step {step.number}: {' and '.join(found)}: rlprims doctor CONFIG compares sampler and trainer"
        was_beyond, self.is_beyond = self.is_beyond, bool(found) and self.config.replay is None
        if self.is_beyond and (self.config.end_at_mismatch or self.config.recompute_log_probs_every > 1):
            raise ValueError(text)
        if self.is_beyond and not was_beyond:
            self.console.print(f"warning: {text}", style="yellow", highlight=False, soft_wrap=True)


def _rms(x: Tensor, mask: Tensor) -> Tensor:
    """(B,): the root mean square over the tokens of a mask; 0 if there are none."""
    return (torch.where(mask, x, 0.0).square().sum(-1) / mask.sum(-1).clamp(min=1)).sqrt()
