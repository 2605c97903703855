"""The few responses of a group that differ most."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.filters import max_variance
from rlprims.testing import check_reward
from tests.records import Record

RECORDS = [
    Record("filters.max_variance", check_reward, call={"keep": 2}, matters={"keep": 3}),
]


def kept(*groups: list[float], keep: int) -> list[list[float]]:
    """The scores that are kept, by group, ascending."""
    scores = torch.tensor([s for group in groups for s in group], dtype=torch.float64)
    ids = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    chosen = max_variance(scores, ids, keep=keep)
    return [sorted(scores[(ids == i) & chosen].tolist()) for i in range(len(groups))]


@given(st.lists(st.lists(st.integers(-5, 5), min_size=1, max_size=7), min_size=1, max_size=3), st.integers(2, 5))
def test_no_other_choice_has_more_variance(groups: list[list[int]], keep: int) -> None:
    for group, got in zip(groups, kept(*groups, keep=keep), strict=True):
        if len(group) <= keep:
            assert got == sorted(group)
            continue
        assert len(got) == keep
        most = max(float(torch.tensor(c, dtype=torch.float64).var()) for c in combinations(group, keep))
        assert float(torch.tensor(got, dtype=torch.float64).var()) == pytest.approx(most)


def test_right_and_wrong_in_equal_numbers() -> None:
    """For rewards of 0 and 1 the paper's rule keeps half of each, as far as there are any."""
    assert kept([1, 0, 0, 0, 0, 0, 1, 1], keep=4) == [[0, 0, 1, 1]]
    assert kept([1, 0, 0, 0, 0, 0], keep=4) == [[0, 0, 0, 1]]


def test_of_equal_variance_the_higher_scores() -> None:
    assert kept([0, 0, 0, 1, 1, 1], keep=3) == [[0, 1, 1]]
    assert kept([0.3] * 5 + [0.4] * 5, [0.3] * 5 + [0.6] * 5, keep=5) == [[0.3] * 2 + [0.4] * 3, [0.3] * 2 + [0.6] * 3]


def test_of_equal_scores_the_first_rows() -> None:
    got = max_variance(torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.zeros(4, dtype=torch.int64), keep=2)
    assert got.tolist() == [True, False, False, True]


def test_a_large_offset_does_not_hide_the_differences() -> None:
    scores = torch.tensor([1e4, 1e4 + 0.25, 1e4 + 0.5, 1e4 + 1.0])
    got = max_variance(scores, torch.zeros(4, dtype=torch.int64), keep=2)
    assert got.tolist() == [True, False, False, True]


def test_fewer_than_two_are_refused() -> None:
    with pytest.raises(ValueError, match="keep=1"):
        kept([0, 1], keep=1)
