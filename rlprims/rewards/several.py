"""Several reward functions at once, each with its own weight, column and failures."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlprims.rewards._calls import Reward, run
from rlprims.rewards._columns import Data
from rlprims.rewards._outcome import Failure, Scores
from rlprims.rewards._scores import weighted_score

__all__ = ["Reward", "Several", "several"]


class Several(NamedTuple):
    """The scores of B responses by several functions."""

    scores: Tensor
    """float32 (B,), Σ weight · score; NaN if a function with a weight failed, or no function applies."""
    columns: dict[str, Tensor]
    """float32 (B,) each: ``NAME``, and ``NAME/OTHER`` for the other numbers of that function."""
    failures: list[list[Failure]]
    """The failures of each row; a cause begins with the name of the function."""
    parts: dict[str, Scores]
    """The scores of each function."""


def several(
    rewards: Sequence[Reward],
    responses: Sequence[str],
    answers: Sequence[Any],
    extra: Mapping[str, Sequence[Any]] | None = None,
    *,
    group_ids: Sequence[Any] | None = None,
) -> Several:
    """Call every function on every row. Functions that wait (async, in threads, pools, servers) run concurrently.

    Args:
        answers: one per row, of any type that the functions accept.
        extra: further columns of the data.
        group_ids: the group of each row, for functions of groups.

    Raises:
        ValueError: two functions with one name; columns of different lengths; a required column is missing.

    >>> def correct(response, answer):
    ...     return float(response == answer)
    >>> async def short(response, *, max_length=3):
    ...     return float(len(response) <= max_length)
    >>> scored = several([Reward(correct), Reward(short, 0.5)], ["72", "seven"], ["72", "7"])
    >>> scored.scores, scored.columns["short"]
    (tensor([1.5000, 0.0000]), tensor([1., 0.]))
    """
    names = [reward.column for reward in rewards]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"expected reward functions of different names, got {names}; give each a name")
    parts = dict(zip(names, run(rewards, Data(responses, answers, extra, group_ids)), strict=True))
    failures: list[list[Failure]] = [[] for _ in responses]
    failed = torch.zeros(len(responses), dtype=torch.bool)
    for reward in rewards:
        for row, failure in enumerate(parts[reward.column].failures):
            if failure is not None and not (reward.skips and failure.cause == "returned None"):
                failures[row].append(Failure(f"{reward.column} {failure.cause}", failure.detail))
                failed[row] |= reward.weight != 0
    weighted = [reward for reward in rewards if reward.weight] or list(rewards)
    stacked = torch.stack([parts[reward.column].scores for reward in weighted], 1)
    scores = weighted_score(stacked, weights=tuple(float(reward.weight) for reward in weighted))
    columns = {name: part.scores for name, part in parts.items()}
    columns |= {f"{name}/{other}": x for name, part in parts.items() for other, x in part.columns.items()}
    return Several(torch.where(failed, torch.nan, scores), columns, failures, parts)
