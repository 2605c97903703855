"""Which groups can teach something."""

import pytest
import torch

from rlprims.filters import varied_scores
from rlprims.testing import check_filter
from tests.records import Record

RECORDS = [
    Record("filters.varied_scores", check_filter, matters={"tolerance": 0.9}),
]


def kept(*groups: list[float], dtype: torch.dtype = torch.float64, **hyperparameters: float) -> list[bool]:
    """One answer per group."""
    scores = torch.tensor([s for group in groups for s in group], dtype=dtype)
    ids = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    keep = varied_scores(scores, ids, **hyperparameters)
    return [bool(keep[ids == i].all()) for i in range(len(groups))]


def test_varied_scores_of_all_right_all_wrong_and_mixed() -> None:
    assert kept([1, 1, 1], [0, 0, 0], [1, 0, 0]) == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_floats_whose_deviation_is_not_zero(dtype: torch.dtype) -> None:
    assert kept([0.1] * 3, [0.1] * 7, [0.1] * 9, [1000.1] * 3, dtype=dtype) == [False] * 4


def test_unknown_scores_and_groups_of_one_have_no_signal() -> None:
    nan, inf = float("nan"), float("inf")
    assert kept([nan, 1.0, 0.0], [inf, 0.0], [-inf, 1.0], [3.0], [1.0, 0.0]) == [False, False, False, False, True]


def test_the_tolerance_is_relative_above_one_and_absolute_below() -> None:
    assert kept([100, 101], [0.0, 0.005], tolerance=0.02) == [False, False]
    assert kept([100, 103], [0.0, 0.03], tolerance=0.02) == [True, True]


def test_varied_scores_of_no_rows() -> None:
    assert varied_scores(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
