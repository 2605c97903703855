"""See :func:`nonzero_range`."""

from rlprims.grouping import is_varied
from rlprims.types import GroupIds, PerSequence, RowMask


def nonzero_range(scores: PerSequence, group_ids: GroupIds, *, tolerance: float = 1e-6) -> RowMask:
    """Keep the groups whose scores differ: DAPO's dynamic sampling (Yu et al. 2025, arXiv:2503.14476), eq. 11.

    A group is kept if max − min > tolerance · max(1, |max|, |min|). For accuracies this is 0 < correct < G. verl and
    the DAPO recipe test ``np.std > 0``, which keeps seven equal scores of 0.1. A group with a NaN is dropped, as is a
    group of one: neither has a signal.

    Args:
        scores: float (B,), the metric: usually the accuracy, not the shaped score.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        tolerance: relative to scores above 1, absolute below.

    Returns:
        bool (B,), the same for all rows of a group.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> import torch
    >>> nonzero_range(torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1])).tolist()
    [False, False, False, True, True]
    """
    if scores.shape != group_ids.shape:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)}, group_ids has {tuple(group_ids.shape)}: both are (B,)"
        )
    return is_varied(scores, group_ids, tolerance=tolerance)
