"""See :func:`micro_batches`."""

from collections.abc import Sequence


def micro_batches(
    lengths: Sequence[int], response_lengths: Sequence[int] | None = None, *, max_tokens: int
) -> list[list[int]]:
    """Rows by length into micro-batches whose padded size, rows x width, is at most ``max_tokens``.

    Longest first, so that rows of like length share a micro-batch and little of it is padding. Every row is in exactly
    one; with aggregations that take ``totals`` the split does not change the step.

    Args:
        lengths: tokens of each row; of its prompt, if ``response_lengths`` is given.
        response_lengths: tokens of each row's response. Prompts are padded on the left and responses on the right, so a
            micro-batch is as wide as its longest prompt and its longest response together.
        max_tokens: budget of one micro-batch, padding counted.

    Returns:
        row numbers of each micro-batch, each ascending.

    Raises:
        ValueError: a row is longer than the budget; it names the row.

    >>> micro_batches([5, 9, 2, 5], max_tokens=10)
    [[1], [0, 3], [2]]
    >>> micro_batches([10, 1], [1, 10], max_tokens=22)
    [[0], [1]]
    """
    second = response_lengths if response_lengths is not None else [0] * len(lengths)
    totals = [a + b for a, b in zip(lengths, second, strict=True)]
    order = sorted(range(len(totals)), key=lambda row: -totals[row])
    if order and totals[order[0]] > max_tokens:
        raise ValueError(
            f"row {order[0]} has {totals[order[0]]} tokens, more than max_tokens={max_tokens}: raise the budget, "
            "or shorten prompts or responses"
        )
    batches: list[list[int]] = []
    first_width = second_width = 0
    for row in order:
        wider = max(first_width, lengths[row]), max(second_width, second[row])
        if batches and (len(batches[-1]) + 1) * sum(wider) <= max_tokens:
            batches[-1].append(row)
            first_width, second_width = wider
        else:
            batches.append([row])
            first_width, second_width = lengths[row], second[row]
    return [sorted(batch) for batch in batches]
