"""The primitives and the hyperparameters whose result is what a trainer computed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlprims import algorithms
from rlprims.algorithms import Algorithm, use
from rlprims.audit._advantages import name_advantages
from rlprims.audit._candidates import Options
from rlprims.audit._found import Found, tensors_of
from rlprims.audit._losses import name_losses
from rlprims.data_proto import DataProto


@dataclass(frozen=True)
class Identified:
    """What :func:`identify` found, by stage. Printed, it is one line per stage."""

    stages: Mapping[str, Found]
    rows: int = field(repr=False)

    def __str__(self) -> str:
        return "\n".join(f"{stage}: {found}" for stage, found in self.stages.items())

    def __getitem__(self, stage: str) -> Found:
        return self.stages[stage]

    @property
    def algorithm(self) -> Algorithm:
        """The stages as an algorithm of this library; raises ``ValueError`` if one of them was not found."""
        lost = [stage for stage, found in self.stages.items() if not found.parts]
        if lost:
            raise ValueError(f"no formula was found for {', '.join(lost)}: {self.stages[lost[0]]}")
        parts = {name: part for found in self.stages.values() for name, part in found.parts.items()}
        parts.setdefault("advantage", use("advantage.discounted_returns"))
        return algorithms.parse({"name": "identified", "group_size": self.rows, **parts})


def identify(
    batch: DataProto | Mapping[str, Any], *, options: Options | None = None, tolerance: float = 1e-5
) -> Identified:
    """Name the functions of this library, with their hyperparameters, that give the numbers of a step.

    Needs ``response_mask`` (B, T) and some of these results, each with the inputs of its formula:

    - ``advantages`` (B, T), from ``scores`` (B,) or ``rewards`` (B, T), with ``group_ids``, ``values`` and so on;
    - ``losses`` (B, T), per token and before their mean, from ``log_probs``, ``old_log_probs``, ``advantages``, ...;
    - ``gradients`` (B, T), of the step's loss by ``log_probs``: they show the mean and its denominator too;
    - ``loss``, a number: the step's. It also shows the mean of ``losses``.

    ``micro_batches`` (B,) and ``ranks`` (B,), the number of each row's, let it see denominators of a part of the step.
    Hyperparameters have the values of all presets and dialects, and usual ones. Coefficients of terms are solved for.

    Args:
        batch: named tensors, padded.
        options: more values of hyperparameters by name, ``{"clip_high": [0.25]}``.
        tolerance: largest difference, relative to the largest number.

    Raises:
        ValueError: the batch has no ``response_mask``, or none of the results.
    """
    data = tensors_of(batch)
    more = options or {}
    stages: dict[str, Found] = {}
    rewarded = "scores" in data or "rewards" in data
    if "advantages" in data and (rewarded or "teacher_log_probs" in data):
        found = name_advantages(data, more, tolerance)
        stages |= {"advantages": found} if found.parts or rewarded else {}
    if "losses" in data or "gradients" in data or "loss" in data:
        stages |= name_losses(data, more, tolerance)
    if not stages:
        raise ValueError(
            "expected advantages with scores or rewards, or losses, gradients or loss with log_probs and advantages; "
            f"the batch has {sorted(data)}"
        )
    sizes = torch.bincount(data["group_ids"]) if "group_ids" in data else torch.ones(1, dtype=torch.int64)
    return Identified(stages, int(sizes.max()))
