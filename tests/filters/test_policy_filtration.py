"""Rows drawn by their score."""

from collections import Counter
from typing import Any

import pytest
import torch

from rlprims.filters import policy_filtration

IDS = torch.tensor([0, 1, 0, 1, 0])
SCORES = torch.tensor([2.0, 1.0, -1.0, 3.0, 0.0])


def draw(scores: torch.Tensor, ids: torch.Tensor, seed: int = 0, **how: Any) -> list[int]:
    return policy_filtration(scores, ids, generator=torch.Generator().manual_seed(seed), **how).tolist()


def shares(scores: torch.Tensor, ids: torch.Tensor, **how: Any) -> list[float]:
    """How often each row was drawn, of so many copies of the batch that three digits are right."""
    n, copies = len(scores), 60_000
    if how.get("over") == "group":
        ids = torch.cat([ids + i * n for i in range(copies)])
    drawn = Counter(row % n for row in draw(scores.repeat(copies), ids if len(ids) > n else ids.repeat(copies), **how))
    return [drawn[row] / copies for row in range(n)]


@pytest.mark.parametrize(
    ("how", "want"),
    [
        ({}, [4 / 15, 1 / 15, 1 / 15, 9 / 15, 0]),
        ({"power": 1.0}, [2 / 7, 1 / 7, 1 / 7, 3 / 7, 0]),
        ({"weights": "max_min"}, [0, 0, 1 / 2, 1 / 2, 0]),
        ({"weights": "max_random"}, [1 / 8, 1 / 8, 1 / 8, 4 / 8, 1 / 8]),
    ],
)
def test_shares_of_the_batch(how: dict[str, Any], want: list[float]) -> None:
    assert shares(SCORES, IDS, **how) == pytest.approx([5 * w for w in want], abs=0.02)


@pytest.mark.parametrize(
    ("how", "want"),
    [
        ({}, [3 * 4 / 5, 2 * 1 / 10, 3 * 1 / 5, 2 * 9 / 10, 0]),
        ({"weights": "max_min"}, [3 / 2, 1, 3 / 2, 1, 0]),
        ({"weights": "max_random"}, [3 * 4 / 6, 2 * 1 / 5, 3 * 1 / 6, 2 * 4 / 5, 3 * 1 / 6]),
    ],
)
def test_shares_of_each_group(how: dict[str, Any], want: list[float]) -> None:
    assert shares(SCORES, IDS, over="group", **how) == pytest.approx(want, abs=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_a_group_keeps_its_places(seed: int) -> None:
    rows = draw(SCORES, IDS, seed, over="group")
    assert IDS[rows].tolist() == IDS.tolist()


def test_the_generator_decides() -> None:
    many, ids = torch.rand(100, generator=torch.Generator().manual_seed(1)), torch.zeros(100, dtype=torch.int64)
    state = torch.get_rng_state()
    assert draw(many, ids, 3) == draw(many, ids, 3) != draw(many, ids, 4)
    assert torch.equal(torch.get_rng_state(), state)


def test_scores_of_zero_are_all_alike() -> None:
    assert shares(torch.zeros(3), torch.zeros(3, dtype=torch.int64)) == pytest.approx([1, 1, 1], abs=0.02)


@pytest.mark.parametrize("unknown", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("weights", ["pow", "max_min", "max_random"])
def test_a_row_of_unknown_score_is_not_drawn(weights: str, unknown: float) -> None:
    scores = torch.tensor([1.0, unknown, 0.5, unknown])
    for over, ids in (("batch", [0, 0, 0, 1]), ("group", [0, 0, 0, 0])):
        for seed in range(30):
            assert not {1, 3} & set(draw(scores, torch.tensor(ids), seed, weights=weights, over=over))


def test_policy_filtration_of_no_rows() -> None:
    assert draw(torch.zeros(0), torch.zeros(0, dtype=torch.int64)) == []


def test_shapes_and_ids_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="scores has shape"):
        draw(SCORES[:2], IDS)
    with pytest.raises(ValueError, match="group_ids run from 0 to 9"):
        draw(SCORES[:2], torch.tensor([0, 9]))


@pytest.mark.parametrize("weights", ["pow", "max_min", "max_random"])
def test_a_group_without_a_known_score_is_not_drawn_either(weights: str) -> None:
    """Its unknown rows were drawn; now the rows in its place come from the other groups."""
    scores = torch.tensor([torch.nan, torch.inf, 1.0, 2.0, torch.nan, -torch.inf, 0.0, torch.nan])
    ids = torch.tensor([0, 0, 1, 1, 0, 2, 3, 3])
    drawn: Counter[int] = Counter()
    for seed in range(50):
        rows = draw(scores, ids, seed, weights=weights, over="group")
        assert set(rows) <= {2, 3, 6}
        assert set(rows[2:4]) <= {2, 3}
        assert rows[6:] == [6, 6]
        drawn.update(rows[:2])
    assert set(drawn) >= {2, 6} if weights == "max_min" else {3, 6} <= set(drawn)


def test_a_pool_of_small_scores_beside_one_of_large_scores_keeps_its_own_rows() -> None:
    """Their weights differ by 30 digits: in one cumulated sum the small ones were lost."""
    scores, ids = torch.tensor([1e15, 1e15, 1e-3, 2e-3, 1e15]), torch.tensor([0, 0, 1, 1, 2])
    for seed in range(50):
        rows = draw(scores, ids, seed, over="group")
        assert ids[rows].tolist() == ids.tolist()


@pytest.mark.parametrize("over", ["batch", "group"])
def test_a_batch_without_a_known_score_is_refused(over: str) -> None:
    with pytest.raises(ValueError, match="none of the 2 scores is finite"):
        draw(torch.tensor([torch.nan, torch.inf]), torch.zeros(2, dtype=torch.int64), over=over)
