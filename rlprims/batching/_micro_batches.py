"""See :func:`micro_batches`."""

from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Rows by length into micro-batches whose padded size, rows x longest, is at most ``max_tokens``.

    Longest first, so that rows of like length share a micro-batch and little of it is padding. Every row is in exactly
    one; with aggregations that take ``totals`` the split does not change the step.

    Args:
        lengths: tokens of each row, prompt and response.
        max_tokens: budget of one micro-batch, padding counted.

    Returns:
        row numbers of each micro-batch, each ascending.

    Raises:
        ValueError: a row is longer than the budget; it names the row.

    >>> micro_batches([5, 9, 2, 5], max_tokens=10)
    [[1], [0, 3], [2]]
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    if order and lengths[order[0]] > max_tokens:
        raise ValueError(
            f"row {order[0]} has {lengths[order[0]]} tokens, more than max_tokens={max_tokens}: raise the budget, "
            "or shorten prompts or responses"
        )
    batches: list[list[int]] = []
    for row in order:
        if batches and (len(batches[-1]) + 1) * max(lengths[batches[-1][0]], 1) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [sorted(batch) for batch in batches]
