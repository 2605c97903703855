"""A band of difficulty."""

import pytest
import torch

from rlprims.filters import solve_rate, varied_scores
from rlprims.testing import check_filter
from tests.records import Record

RECORDS = [
    Record(
        "filters.solve_rate",
        check_filter,
        call={"low": -0.5, "high": 0.5},
        matters={"low": 0.0, "high": 0.1},
        exempt={"equal scores are dropped": "asks how high the mean is, not whether scores differ"},
    ),
]


def kept(*groups: list[float], **hyperparameters: float) -> list[bool]:
    """One answer per group."""
    scores = torch.tensor([s for group in groups for s in group])
    ids = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    keep = solve_rate(scores, ids, **hyperparameters)
    return [bool(keep[ids == i].all()) for i in range(len(groups))]


def test_prompts_that_are_never_or_always_solved_are_dropped() -> None:
    assert kept([1, 1, 1], [0, 0, 0], [1, 0, 0], [1, 1, 0]) == [False, False, True, True]


def test_the_bounds_are_excluded() -> None:
    assert kept([1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], low=0.25, high=0.75) == [False, True, False]


def test_for_scores_of_zero_and_one_the_open_band_is_the_nonzero_range() -> None:
    scores = torch.tensor([1.0, 1, 1, 0, 0, 0, 1, 0, 0])
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    assert torch.equal(solve_rate(scores, ids), varied_scores(scores, ids))


def test_unknown_scores_are_dropped() -> None:
    nan, inf = float("nan"), float("inf")
    assert kept([nan, 0, 1], [inf, 0], [-inf, 0], [0, 1], low=-9.0, high=9.0) == [False, False, False, True]


def test_an_empty_band_is_refused() -> None:
    with pytest.raises(ValueError, match=r"low=0\.5 and high=0\.5, expected low < high"):
        kept([1, 0], low=0.5, high=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_order_of_the_rows_does_not_decide_at_an_exact_bound(dtype: torch.dtype) -> None:
    """A rounded mean was compared: nine of ten were or were not below high=0.9, by the place of the wrong response."""
    for count in (3, 10, 100):
        ids = torch.zeros(count, dtype=torch.int64)
        for solved in range(1, count):
            flags = (torch.arange(count) < solved).to(dtype)
            bound = solved / count
            for scores in (flags, flags.flip(0), flags[torch.randperm(count)]):
                assert not solve_rate(scores, ids, high=bound).any()
                assert not solve_rate(scores, ids, low=bound).any()
                assert solve_rate(scores, ids, low=bound - 1e-6, high=bound + 1e-6).all()


def test_equal_scores_have_exactly_that_mean() -> None:
    for dtype in (torch.float32, torch.float64):
        for score in (0.1, 0.3, 0.7):
            scores, ids = torch.full((7,), score, dtype=dtype), torch.zeros(7, dtype=torch.int64)
            assert not solve_rate(scores, ids, low=score).any()
            assert not solve_rate(scores, ids, high=score).any()
