"""The end of a run whose updates are not finite: which stage was the first, and in which rows."""

import math
from collections.abc import Callable
from typing import Any

import torch

from rlprims.algorithms import Algorithm, objective_parts, token_weights
from rlprims.data_proto import DataProto
from rlprims.runs.steps import StepResult

_STAGES = (
    *("rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "scores", "shaped_scores", "rewards"),
    *("advantages", "returns", "log_probs", "loss_weights", "loss", "gradient"),
)
"""In the order in which they are computed. The gradient is that of the loss by the policy's log-probs."""


class SkippedUpdates:
    """A hook that warns of a step with updates that are not finite, and ends the run after three such in a row."""

    def __init__(self, console: Any, save: Callable[[], None], resume: str) -> None:
        self.console, self.save, self.resume = console, save, resume
        self.in_a_row: dict[str, int] = {}

    def __call__(self, trainer: Any, step: StepResult) -> None:
        for model in dict.fromkeys(name for name, _ in step.updates):
            reports = [report for name, report in step.updates if name == model]
            wrong = sum(report.skipped or not math.isfinite(report.loss) for report in reports)
            self.in_a_row[model] = count = self.in_a_row.get(model, 0) + 1 if wrong else 0
            if count not in (1, 3):
                continue
            text = f"step {step.number}: {wrong} of {len(reports)} updates of the {model} not finite"
            text += f"{', the third step in a row' * (count == 3)}: {trainer.not_finite(model, step.batch)}"
            if count == 3:
                self.save()  # they were skipped, so the weights are those without them
                raise ValueError(f"{text}; then: {self.resume}")
            self.console.print(f"warning: {text}", style="yellow", highlight=False, soft_wrap=True)


def first_not_finite(execution: Any, algorithm: Algorithm, model: str, batch: DataProto) -> str:
    """The first stage of a step's updates that is not finite, with its rows; the policy scores them again."""
    data, mask = dict(batch.batch.items()), batch["response_mask"]
    needs = algorithm.loss_needs | algorithm.token_weight_needs
    if model == "policy" and needs <= {*data, "log_probs", "entropies", "loss_weights"}:
        data["log_probs"] = log_probs = execution.log_probs(batch).requires_grad_()
        if "entropies" in needs:
            data["entropies"] = execution.entropies(batch)
        data |= token_weights(algorithm, data, generator=torch.Generator())
        data["loss"] = torch.stack([part.losses(data) for part in objective_parts(algorithm)]).sum(0)
        if data["loss"].requires_grad:
            (data["gradient"],) = torch.autograd.grad(data["loss"].sum(), log_probs)
    wrong = {name: ~data[name].isfinite() for name in _STAGES if name in data}
    wrong = {name: (x & mask).any(-1) if x.dim() == 2 else x for name, x in wrong.items()}
    for stage, rows in wrong.items():
        if "scores" in stage:  # a response without a score has NaN, and no advantage
            rows = rows & wrong["advantages"]
        if rows.any():
            shown = ", ".join(map(str, batch["sample_id"][rows].unique().tolist()[:8]))
            return f"{stage} of {int(rows.sum())} of {len(batch)} rows, sample_id {shown}"
    return f"the gradient of the {model}'s weights"
