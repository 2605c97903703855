"""See :func:`completed`."""

import torch

from rlprims.grouping import group_mean
from rlprims.types import GroupIds, RowMask


def completed(truncated: RowMask, group_ids: GroupIds, *, max_share: float = 0.0) -> RowMask:
    """Keep the groups in which at most a share of the responses was cut off: truncated, aborted or failed.

    To drop such responses and not their groups, take them out of the loss (``response_mask & ~truncated[:, None]``) and
    leave them in the group's baseline, or out of both (``valid_rows=~truncated``).

    Args:
        truncated: bool (B,), True if the response did not end by itself; or any other flag of a response to do without.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        max_share: of the group's responses, from 0 (none may be cut off) to below 1.

    Returns:
        bool (B,), the same for all rows of a group.

    Raises:
        ValueError: shapes or dtypes that do not fit; max_share outside [0, 1).

    >>> import torch
    >>> completed(torch.tensor([False, True, False, False]), torch.tensor([0, 0, 1, 1])).tolist()
    [False, False, True, True]
    """
    if truncated.shape != group_ids.shape or truncated.dtype is not torch.bool:
        raise ValueError(
            f"truncated has shape {tuple(truncated.shape)} and dtype {truncated.dtype}, group_ids has shape "
            f"{tuple(group_ids.shape)}: bool (B,) and int64 (B,)"
        )
    if not 0 <= max_share < 1:
        raise ValueError(f"max_share={max_share} must be in [0, 1): at 1 every group is kept")
    return group_mean(truncated.float(), group_ids) <= max_share
