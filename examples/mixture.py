"""Mixtures: different algorithms for the rows of one batch, for example for the environments of one run.

Copy this file beside a trainer of your own. A column ``spec_ids`` (B,) has the number of each row's algorithm
in a list; all rows of a group have the same number. For each algorithm the rows of the others have no tokens. The
policy's denominators are those of the whole step, so that a token has the same weight in every algorithm.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlprims.algorithms import (
    Algorithm,
    StepCounts,
    estimate_advantages,
    policy_objective,
    shape_scores,
    step_counts,
    token_weights,
)
from rlprims.kernels import are_readable
from rlprims.layout import expand_to_tokens
from rlprims.losses import count_totals
from rlprims.masking import check_sequences
from rlprims.types import RowMask

Data = Mapping[str, Any]


def only_rows(data: Data, rows: RowMask) -> dict[str, Any]:
    """The data with tokens in the given rows only: bool columns like ``response_mask`` are False in all other rows.

    >>> data = {"response_mask": torch.tensor([[True, True], [True, False]])}
    >>> only_rows(data, torch.tensor([False, True]))["response_mask"].tolist()
    [[False, False], [True, False]]
    """
    mask, cu_seqlens = data["response_mask"], data.get("cu_seqlens")
    check_sequences(mask, cu_seqlens, rows=rows)
    in_rows = expand_to_tokens(rows, mask, cu_seqlens)
    tensors = {name: x for name, x in data.items() if isinstance(x, Tensor)}
    masks = {name: x & in_rows for name, x in tensors.items() if x.dtype is torch.bool and x.shape == mask.shape}
    valid = data.get("valid_rows")
    return {**data, **masks, "valid_rows": rows if valid is None else rows & valid}


def mixture_advantages(specs: Sequence[Algorithm], data: Data) -> dict[str, Tensor]:
    """The result of :func:`estimate_advantages` for the rows of each algorithm, with the algorithm's score shaping.

    Raises:
        ValueError: ``spec_ids`` is missing, or has a number outside of the list.
    """
    merged: dict[str, Tensor] = {}
    for rows, spec in zip(_rows_of(specs, data), specs, strict=True):
        own_data = only_rows(data, rows)
        for name, x in estimate_advantages(spec, own_data | shape_scores(spec, own_data)).items():
            merged[name] = merged[name] + x if name in merged else x
    return merged


def mixture_counts(specs: Sequence[Algorithm], data: Data, *, generator: torch.Generator | None = None) -> StepCounts:
    """The results of :func:`token_weights` and :func:`step_counts` for each algorithm, for a whole step."""
    columns: dict[str, Tensor] = {}
    labels = (data.get(name) for name in ("cu_seqlens", "group_ids", "trajectory_ids"))
    totals = {"totals": count_totals(data["response_mask"], *labels)}
    for number, (rows, spec) in enumerate(zip(_rows_of(specs, data), specs, strict=True)):
        own_data = only_rows(data, rows)
        weights = token_weights(spec, own_data, generator=generator)
        counts = step_counts(spec, own_data | weights)
        columns |= {_spec_name(number, name): x for name, x in {**weights, **counts.columns}.items()}
        totals |= {_spec_name(number, name): x for name, x in counts.totals.items() if name != "totals"}
    return StepCounts(columns, totals)


def mixture_objective(specs: Sequence[Algorithm], data: Data) -> Tensor:
    """The scalar to minimize: the sum of the objectives of all algorithms, each on its own rows.

    ``data`` must have ``spec_ids``, and the columns and totals of :func:`mixture_counts` of the whole step.

    >>> from rlprims import algorithms
    >>> specs = [algorithms.reinforce(), algorithms.sft()]
    >>> data = {"log_probs": torch.tensor([[-1.0], [-2.0]]), "advantages": torch.tensor([[3.0], [0.0]])}
    >>> data |= {"response_mask": torch.ones(2, 1, dtype=torch.bool), "spec_ids": torch.tensor([0, 1])}
    >>> counts = mixture_counts(specs, data)
    >>> mixture_objective(specs, data | counts.columns | counts.totals)  # (3 · 1 + 2) / 2
    tensor(2.5000)
    """
    if data.get("totals") is None:
        raise ValueError("the batch has no totals: add mixture_counts(specs, data) of the whole step")
    parts = []
    for number, (rows, spec) in enumerate(zip(_rows_of(specs, data), specs, strict=True)):
        prefix = _spec_name(number, "")
        own = {name.removeprefix(prefix): x for name, x in data.items() if name.startswith(prefix)}
        parts.append(policy_objective(spec, {**only_rows(data, rows), **own}))
    return torch.stack(parts).sum()


def _rows_of(specs: Sequence[Algorithm], data: Data) -> list[RowMask]:
    if "spec_ids" not in data:
        raise ValueError(f"the batch has no spec_ids; it has {sorted(data)}: add the number of each row's spec, (B,)")
    spec_ids = data["spec_ids"]
    check_sequences(data["response_mask"], data.get("cu_seqlens"), spec_ids=spec_ids)
    if are_readable(spec_ids) and ((spec_ids < 0) | (spec_ids >= len(specs))).any():
        raise ValueError(f"spec_ids has {sorted(set(spec_ids.tolist()))}, expected numbers in [0, {len(specs)})")
    return [spec_ids == number for number in range(len(specs))]


def _spec_name(number: int, name: str) -> str:
    return f"specs.{number}.{name}"
