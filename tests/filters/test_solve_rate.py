"""A band of difficulty."""

import pytest
import torch

from rlprims.filters import nonzero_range, solve_rate


def kept(*groups: list[float], **hyperparameters: float) -> list[bool]:
    """One answer per group."""
    scores = torch.tensor([s for group in groups for s in group])
    ids = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    keep = solve_rate(scores, ids, **hyperparameters)
    return [bool(keep[ids == i].all()) for i in range(len(groups))]


def test_what_nobody_and_what_everybody_solves_is_dropped() -> None:
    assert kept([1, 1, 1], [0, 0, 0], [1, 0, 0], [1, 1, 0]) == [False, False, True, True]


def test_the_bounds_are_excluded() -> None:
    assert kept([1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], low=0.25, high=0.75) == [False, True, False]


def test_for_scores_of_zero_and_one_the_open_band_is_the_nonzero_range() -> None:
    scores = torch.tensor([1.0, 1, 1, 0, 0, 0, 1, 0, 0])
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    assert torch.equal(solve_rate(scores, ids), nonzero_range(scores, ids))


def test_unknown_scores_are_dropped() -> None:
    nan, inf = float("nan"), float("inf")
    assert kept([nan, 0, 1], [inf, 0], [-inf, 0], [0, 1], low=-9.0, high=9.0) == [False, False, False, True]


def test_an_empty_band_is_refused() -> None:
    with pytest.raises(ValueError, match=r"low=0\.5 must be below high=0\.5"):
        kept([1, 0], low=0.5, high=0.5)
