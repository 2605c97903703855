"""A quantile as baseline."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.advantage import quantile_baseline
from rlprims.testing import check_advantage
from tests.records import Record

RECORDS = [
    Record(
        "advantage.quantile_baseline",
        check_advantage,
        matters={"level": 0.9, "normalize_std": False, "ddof": 0, "eps": 0.1, "tolerance": 10.0},
    ),
]


def per_response(scores: list[float], ids: list[int] | None = None, **kwargs: object) -> list[float]:
    rewards, mask = torch.tensor(scores, dtype=torch.float64)[:, None], torch.ones(len(scores), 1, dtype=torch.bool)
    return quantile_baseline(rewards, torch.tensor(ids or [0] * len(scores)), mask, **kwargs)[:, 0].tolist()


def test_on_a_hard_prompt_only_successes_have_advantages() -> None:
    assert per_response([1, 0, 0, 0], eps=0.0) == [2, 0, 0, 0]


def test_on_an_easy_prompt_only_failures_have_advantages() -> None:
    assert per_response([1, 1, 0, 1], eps=0.0) == [0, 0, -2, 0]


def test_the_second_of_five() -> None:
    """0.4 · 5 = 2, and 0.6 · 5 is 3 and not 4."""
    assert per_response([5, 1, 4, 2, 3], normalize_std=False) == [3, -1, 2, 0, 1]
    assert per_response([5, 1, 4, 2, 3], level=0.6, normalize_std=False) == [2, -2, 1, -1, 0]


def test_the_largest() -> None:
    assert per_response([5, 1, 4], level=1.0, normalize_std=False) == [0, -4, -1]


def test_the_least_level_is_the_smallest() -> None:
    assert per_response([5, 1, 4], level=1e-9, normalize_std=False) == [4, 0, 3]


def test_groups_in_mixed_order() -> None:
    assert per_response([5, 1, 4, 3], [1, 0, 1, 0], level=0.5, normalize_std=False) == [1, 0, 0, 2]


def test_equal_rewards_and_a_group_of_one_give_zero() -> None:
    assert per_response([0.1] * 7, eps=1e-9) == [0] * 7
    assert per_response([5.0]) == [0]


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=12), st.sampled_from([0.1, 0.25, 0.4, 0.5, 0.75, 0.9, 1.0]))
def test_a_share_of_the_group_is_not_above_the_baseline(scores: list[int], level: float) -> None:
    n = len(scores)
    if len(set(scores)) == 1:
        return
    got = per_response([float(s) for s in scores], level=level, normalize_std=False)
    (baseline,) = {s - a for s, a in zip(scores, got, strict=True)}
    assert sum(s <= baseline for s in scores) >= level * n - 1e-4
    assert sum(s < baseline for s in scores) < level * n - 1e-4


@pytest.mark.parametrize("level", [0.0, -0.1, 1.1])
def test_a_level_outside_is_refused(level: float) -> None:
    with pytest.raises(ValueError, match="level"):
        per_response([1, 0], level=level)
