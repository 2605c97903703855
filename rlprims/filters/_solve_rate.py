"""See :func:`solve_rate`."""

from rlprims.grouping import group_mean
from rlprims.types import GroupIds, PerSequence, RowMask


def solve_rate(scores: PerSequence, group_ids: GroupIds, *, low: float = 0.0, high: float = 1.0) -> RowMask:
    """Keep the groups whose mean score lies in a band: prompts that are neither too hard nor too easy.

    low < mean < high as in OpenRLHF, the bounds excluded: 0 and 1 drop what nobody and what everybody solves. Give
    bounds a little outside to keep them. A mean says nothing of differences: seven scores of 0.1 pass, see
    :func:`nonzero_range`. A group with an unknown score is dropped.

    Args:
        scores: float (B,), usually the accuracy.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        low, high: of the group's mean, excluded.

    Returns:
        bool (B,), the same for all rows of a group.

    Raises:
        ValueError: shapes or dtypes that do not fit; low not below high.

    >>> import torch
    >>> solve_rate(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])).tolist()
    [False, False, True, True]
    """
    if scores.shape != group_ids.shape:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)}, group_ids has {tuple(group_ids.shape)}: both are (B,)"
        )
    if not low < high:
        raise ValueError(f"low={low} must be below high={high}: no group would be kept")
    mean = group_mean(scores, group_ids)
    return (mean > low) & (mean < high)
