"""Scored groups: shape, filter, split and join."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from rlprims import algorithms
from rlprims.algorithms import Algorithm
from rlprims.data_proto import DataProto
from rlprims.execution import kept_columns
from rlprims.grouping import dense_ids
from rlprims.trainer.scoring.columns import first_rows, rollout_ids, same_widths


def with_baseline_scores(rows: DataProto, greedy: DataProto) -> DataProto:
    """The rows with ``baseline_scores``, the score of their prompt's greedy response."""
    scores = first_rows(greedy)["scores"][dense_ids(rows["group"])]
    return rows.union(DataProto.from_dict(tensors={"baseline_scores": scores}))


def split_groups(
    algorithm: Algorithm, rows: DataProto, *, leave_out: bool = False
) -> tuple[list[DataProto], list[str | None]]:
    """The rows with shaped scores, split into groups, and for each group the reason to drop it, or None.

    With ``leave_out`` a row without a score does not drop its group: it is False in ``valid_rows``, like the rows that
    ``algorithm.ended`` leaves out, and the filter reads the mean of the group's other rows for it.
    """
    columns = {name: column for name, column in rows.batch.items() if name != "kept_ids"}  # kept_ids is ragged
    columns |= rollout_ids(rows)
    added: dict[str, Tensor] = {}
    if "baseline_scores" in columns:  # without a baseline the row has no advantage
        columns["scores"] = torch.where(columns["baseline_scores"].isfinite(), columns["scores"], torch.nan)
    if leave_out:
        added["valid_rows"] = columns["scores"].isfinite()
    added |= algorithms.leave_out_rows(algorithm, {**columns, **added})
    columns = algorithms.fill_invalid_scores(algorithm, {**columns, **added})
    added |= {**algorithms.component_scores(algorithm, columns), **algorithms.shape_scores(algorithm, columns)}
    reasons = algorithms.filter_groups(algorithm, {**columns, **added})
    rows = rows.union(DataProto.from_dict(tensors=added))
    sizes = columns["group_ids"].bincount().tolist()  # in rows: a sample may have several
    ends = list(accumulate(sizes))
    return [rows[end - size : end] for size, end in zip(sizes, ends, strict=True)], [reasons[end - 1] for end in ends]


def join_groups(groups: Sequence[DataProto], *, pad_token_id: int = 0) -> DataProto:
    """The groups as one batch, padded to the widest. A column of the verifier that a group lacks is NaN there.

    A group without kept sets was sampled without truncation, so its sets are the whole vocabulary.
    """
    if any("turn_rewards" in group for group in groups):
        groups = same_widths(groups, pad_token_id=pad_token_id)
    names = {name: column.dtype for group in groups for name, column in group.batch.items() if column.dim() == 1}
    truncated = any("kept_ids" in group for group in groups)
    parts = []
    for group in groups:
        missing = {n: torch.full((len(group),), torch.nan, dtype=t) for n, t in names.items() if n not in group}
        if truncated and "kept_ids" not in group:
            missing |= kept_columns(torch.zeros(0), torch.zeros(group["response_mask"].shape))
        parts.append(group.union(DataProto.from_dict(tensors=missing)) if missing else group)
    return DataProto.concat(parts)
