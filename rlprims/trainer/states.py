"""The objects with state of an algorithm's stages: each is created once, called with named data, and saved."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlprims.algorithms import Algorithm
from rlprims.data_proto import DataProto
from rlprims.execution import Execution
from rlprims.trainer.collect.episodes import first_rows
from rlprims.trainer.collect.rollout import join

_OF_LOG_PROBS = (
    *("prompts", "responses", "attention_mask", "response_mask"),
    *("kept_ids", "kept_counts", "old_log_probs", "turn_rewards"),
)
"""What the log-probs of a response need to be computed again, and those of then; the last is of episodes."""


class States:
    """The controllers and memories of an algorithm by their stage. ``state_dict`` is JSON; the rest is ``answers``."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.objects = {stage: part({}) for stage, part in algorithm.stateful.items()}
        self.answers: dict[str, DataProto] = {}
        """By prompt the newest responses that were trained on: only if an object needs ``kl``."""

    @property
    def of_this_step(self) -> Algorithm:
        """The algorithm with the numbers of its controllers."""
        return self.algorithm.with_coefficients(self._coefficients())

    def baseline(self, batch: DataProto) -> dict[str, Tensor]:
        """``baseline_scores`` (B,), from the batches before this one; nothing if the algorithm has no such object."""
        memory = self.objects.get("baseline")
        return {} if memory is None else {"baseline_scores": _call(memory.baseline, _columns(batch))}

    def kl(self, execution: Execution, batch: DataProto) -> dict[str, Tensor]:
        """``kl`` (B,): mean |change of log-prob| of the prompt's last responses, 0 for a new prompt; if a memory asks.

        Call it before the update, with the policy that will be updated.
        """
        if not self.algorithm.baseline_measures_kl:
            return {}
        keys: list[str] = batch["example"].tolist()
        known = [self.answers[key] for key in dict.fromkeys(keys) if key in self.answers]
        moved = dict[str, float]()
        if known:
            before = join(known, pad_token_id=execution.pad_token_id)
            mask = before["response_mask"]
            change = torch.where(mask, execution.log_probs(before) - before["old_log_probs"], 0.0).abs().double()
            for key in dict.fromkeys(before["example"].tolist()):
                rows = torch.tensor([other == key for other in before["example"]])
                moved[key] = float(change[rows].sum() / mask[rows].sum().clamp(min=1))
        return {"kl": torch.tensor([moved.get(key, 0.0) for key in keys])}

    def learn(self, batch: DataProto) -> None:
        """The scores of a batch, after it was compared with the baseline; rows without a score are left out."""
        memory = self.objects.get("baseline")
        if memory is None:
            return
        counted = batch["scores"].isfinite()
        if "valid_rows" in batch:
            counted &= batch["valid_rows"]
        if bool(counted.any()):
            _call(memory.update, _columns(first_rows(batch[counted])))
        if self.algorithm.baseline_measures_kl:
            keys = batch["example"]
            kept = batch.select([name for name in _OF_LOG_PROBS if name in batch], ["example"])
            for key in dict.fromkeys(keys.tolist()):
                self.answers[key] = kept.select_idxs(torch.tensor(keys == key)).select(deepcopy=True)

    def measured(self, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of a step's updates to the controllers, by their names."""
        for stage in self._coefficients():
            if "loss" in metrics:  # in a critic's warm-up there is none
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
    """The data by name: the batch's columns, ``prompts`` as keys, ``roles`` of the data, and its other fields."""
    fields = batch["fields"].tolist()
    names = dict.fromkeys(name for row in fields for name in row)
    columns: dict[str, Any] = {name: [row.get(name) for row in fields] for name in names}
    if all(row.get("role") is not None for row in fields):
        columns["roles"] = [str(row["role"]) for row in fields]
    return columns | dict(batch.batch.items()) | {"prompts": batch["example"].tolist()}


def _call(method: Callable[..., Any], data: Mapping[str, Any]) -> Any:
    """Call it with those of the columns that its arguments name."""
    parameters = inspect.signature(method).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty]
    if missing := [name for name in needed if name not in data]:
        of_data = "; the field role of every row of the data makes roles" if "roles" in missing else ""
        raise ValueError(f"{method.__qualname__} takes {missing}, which the trainer does not have{of_data}")
    return method(**{p.name: data[p.name] for p in parameters if p.name in data})
