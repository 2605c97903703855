"""See :func:`finite`."""

from rlprims.grouping import group_count
from rlprims.types import GroupIds, PerSequence, RowMask


def finite(scores: PerSequence, group_ids: GroupIds) -> RowMask:
    """Keep the groups in which every score is a finite number.

    A verifier that answers NaN knows nothing of that sample, and one unknown score makes the group's mean unknown.

    Args:
        scores: float (B,).
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.

    Returns:
        bool (B,), the same for all rows of a group.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> import torch
    >>> finite(torch.tensor([1.0, torch.nan, 2.0]), torch.tensor([0, 0, 1])).tolist()
    [False, False, True]
    """
    if scores.shape != group_ids.shape:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)}, group_ids has {tuple(group_ids.shape)}: both are (B,)"
        )
    return group_count(group_ids, ~scores.isfinite()) == 0
