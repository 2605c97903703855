"""See :func:`attention_workload`."""

from collections.abc import Sequence

import numpy as np

from rlprims.batching._units import Integers


def attention_workload(lengths: Sequence[int] | Integers, *, hidden_size: int = 4096) -> Integers:
    """What each row costs a transformer, 6 h l + l²: work for :func:`balance` when rows are long.

    A layer multiplies with 12 h² weights (24 h² l operations) and attends to all tokens (4 h l²); over 4 h that is the
    formula. With h = 4096, a model of 7B, attention costs as much as the weights at 24576 tokens. Tokens alone are
    right for short rows.

    Args:
        lengths: tokens of each row.
        hidden_size: h.

    Returns:
        int64 (B,).

    >>> attention_workload([1, 1000, 24576]).tolist()
    [24577, 25576000, 1207959552]
    """
    tokens = np.asarray(lengths, np.int64)
    return 6 * hidden_size * tokens + tokens**2
