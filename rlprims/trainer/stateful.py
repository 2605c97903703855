"""The stages of an algorithm that have state: controllers and baselines. Each is created once and saved."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlprims.algorithms import Algorithm
from rlprims.data_proto import DataProto
from rlprims.execution import Execution
from rlprims.trainer.scoring.columns import first_rows
from rlprims.trainer.scoring.groups import join_groups

_KEPT_COLUMNS = (
    *("prompts", "responses", "attention_mask", "response_mask"),
    *("kept_ids", "kept_counts", "routed_experts", "old_log_probs", "turn_rewards"),
)
"""The columns from which log-probs are computed again, and the old log-probs; of turns also their rewards."""


class States:
    """The controllers and baselines of an algorithm by stage. The state is ``state_dict``, in JSON, and ``answers``."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.objects = {stage: part({}) for stage, part in algorithm.stateful.items()}
        self.answers: dict[str, DataProto] = {}
        """The last responses to each prompt that were trained on; empty unless a baseline reads ``kl``."""

    @property
    def of_this_step(self) -> Algorithm:
        """The algorithm with the current coefficients of its controllers."""
        return self.algorithm.with_coefficients(self._coefficients())

    def baseline(self, batch: DataProto) -> dict[str, Tensor]:
        """``baseline_scores`` (B,), from earlier batches; empty if the algorithm has no stateful baseline."""
        baseline = self.objects.get("baseline")
        return {} if baseline is None else {"baseline_scores": _call(baseline.baseline, _columns(batch))}

    def kl(self, execution: Execution, batch: DataProto) -> dict[str, Tensor]:
        """``kl`` (B,), if the baseline reads it: the mean |change| of the log-probs of the prompt's last responses."""
        if not self.algorithm.baseline_measures_kl:
            return {}
        keys: list[str] = batch["example"].tolist()
        earlier = [self.answers[key] for key in dict.fromkeys(keys) if key in self.answers]
        changes = dict[str, float]()
        if earlier:
            before = join_groups(earlier, pad_token_id=execution.pad_token_id)
            mask = before["response_mask"]
            change = torch.where(mask, execution.log_probs(before) - before["old_log_probs"], 0.0).abs().double()
            for key in dict.fromkeys(before["example"].tolist()):
                rows = torch.tensor([other == key for other in before["example"]])
                changes[key] = float(change[rows].sum() / mask[rows].sum().clamp(min=1))
        return {"kl": torch.tensor([changes.get(key, 0.0) for key in keys])}

    def update_baseline(self, batch: DataProto) -> None:
        """Update the baseline with the scores of a batch, after its advantages; rows without a score are left out."""
        baseline = self.objects.get("baseline")
        if baseline is None:
            return
        scored = batch["scores"].isfinite()
        if "valid_rows" in batch:
            scored &= batch["valid_rows"]
        if bool(scored.any()):
            _call(baseline.update, _columns(first_rows(batch[scored])))
        if self.algorithm.baseline_measures_kl:
            keys = batch["example"]
            kept = batch.select([name for name in _KEPT_COLUMNS if name in batch], ["example"])
            for key in dict.fromkeys(keys.tolist()):
                self.answers[key] = kept.select_idxs(torch.tensor(keys == key)).select(deepcopy=True)

    def update_controllers(self, metrics: Mapping[str, float]) -> None:
        """Update the controllers with the metrics of a step's updates."""
        for stage in self._coefficients():
            if "loss" in metrics:  # absent during a critic's warm-up
                _call(self.objects[stage].update, metrics)

    def metrics(self) -> dict[str, float]:
        return {f"coefficient/{stage}": value for stage, value in self._coefficients().items()}

    def state_dict(self) -> dict[str, Any]:
        return {stage: part.state_dict() for stage, part in self.objects.items()}

    def load_state_dict(self, state: Mapping[str, Any], answers: Sequence[DataProto]) -> None:
        for stage, part in self.objects.items():
            part.load_state_dict(state[stage])
        self.answers = {rows["example"][0]: rows for rows in answers}

    def _coefficients(self) -> dict[str, float]:
        return {stage: part.value for stage, part in self.objects.items() if stage.startswith("loss_terms.")}


def _columns(batch: DataProto) -> dict[str, Any]:
    """The data by name: the batch's columns, the fields of its rows, ``prompts`` as keys, and ``roles``."""
    fields = batch["fields"].tolist()
    names = dict.fromkeys(name for row in fields for name in row)
    columns: dict[str, Any] = {name: [row.get(name) for row in fields] for name in names}
    if all(row.get("role") is not None for row in fields):
        columns["roles"] = [str(row["role"]) for row in fields]
    return columns | dict(batch.batch.items()) | {"prompts": batch["example"].tolist()}


def _call(method: Callable[..., Any], data: Mapping[str, Any]) -> Any:
    """Call a method with the columns that its parameters name."""
    parameters = inspect.signature(method).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty]
    if missing := [name for name in needed if name not in data]:
        of_data = "; roles needs a field role in every row of the data" if "roles" in missing else ""
        raise ValueError(f"{method.__qualname__} takes {missing}, which the trainer does not have{of_data}")
    return method(**{p.name: data[p.name] for p in parameters if p.name in data})
