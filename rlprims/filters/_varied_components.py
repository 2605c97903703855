"""See :func:`varied_components`."""

import torch

from rlprims.filters._finite import finite
from rlprims.filters._nonzero_range import nonzero_range
from rlprims.types import ComponentScores, GroupIds, RowMask


def varied_components(component_scores: ComponentScores, group_ids: GroupIds, *, tolerance: float = 1e-6) -> RowMask:
    """Keep the groups in which any reward varies: :func:`nonzero_range` for ``advantage.gdpo`` (arXiv:2601.05242).

    GDPO normalizes each reward alone, so a group whose sums are equal teaches if the rewards behind them differ: one
    response is right, another well formatted. A filter on the sum would drop it. A group with an unknown score in any
    reward is dropped.

    Args:
        component_scores: float (B, K), one column for each reward.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        tolerance: relative to scores above 1, absolute below.

    Returns:
        bool (B,), the same for all rows of a group.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> import torch
    >>> scores = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    >>> varied_components(scores, torch.tensor([0, 0, 1, 1])).tolist()
    [True, True, False, False]
    """
    if component_scores.dim() != 2 or len(component_scores) != len(group_ids) or not component_scores.shape[1]:
        raise ValueError(
            f"component_scores has shape {tuple(component_scores.shape)}, group_ids has {tuple(group_ids.shape)}: "
            "(B, K) with one column for each reward, and (B,)"
        )
    columns = component_scores.unbind(1)
    varied = torch.stack([nonzero_range(scores, group_ids, tolerance=tolerance) for scores in columns])
    known = torch.stack([finite(scores, group_ids) for scores in columns])
    return varied.any(0) & known.all(0)
