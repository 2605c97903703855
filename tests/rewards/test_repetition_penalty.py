"""Repeated n-grams cost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.rewards import repetition_penalty
from rlprims.testing import check_reward
from tests.records import Record

RECORDS = [
    Record("rewards.repetition_penalty", check_reward, matters={"ngram": 2, "penalty_factor": 0.5}),
    Record("rewards.repetition_penalty", check_reward, call={"ngram": 1}),
    Record("rewards.repetition_penalty", check_reward, call={"ngram": 4}),
]

ROWS = [[1, 2, 3, 1, 2, 3, 1], [5, 5, 5, 5, 5, 5], [1, 2], [1, 2, 3, 4], []]


def packed(rows: list[list[int]], **hyperparameters: float) -> list[float]:
    ids = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
    cu_seqlens = torch.tensor([0, *map(len, rows)]).cumsum(0)
    mask = torch.ones(len(ids), dtype=torch.bool)
    return repetition_penalty(ids, mask, cu_seqlens, **hyperparameters).tolist()


@pytest.mark.parametrize(
    ("ngram", "penalties"),
    [
        (1, [-0.2857142857142857, -0.4166666666666667, 0, 0, 0]),
        (2, [-0.25, -0.4, 0, 0, 0]),
        (3, [-0.2, -0.375, 0, 0, 0]),
    ],
)
def test_as_trl(ngram: int, penalties: list[float]) -> None:
    """TRL 1.16.0, get_repetition_penalty_reward with max_penalty −0.5."""
    assert packed(ROWS, ngram=ngram, penalty_factor=0.5) == pytest.approx(penalties)


def test_ngrams_do_not_cross_responses() -> None:
    assert packed([[1, 2, 3], [1, 2, 3], [1, 2, 3]]) == [0, 0, 0]
    assert packed([[7, 7], [7, 7], [7]], ngram=2) == [0, 0, 0]


def test_masked_tokens_are_skipped() -> None:
    mask = torch.tensor([[False, True, True, False, True, True]])
    ids = torch.tensor([[-100, 4, 9, 7, 4, 9]])
    assert repetition_penalty(ids, mask, ngram=2).tolist() == pytest.approx([-1 / 3])
    junk = torch.tensor([[2**60, 4, 9, -(2**60), 4, 9]])
    assert torch.equal(repetition_penalty(junk, mask, ngram=2), repetition_penalty(ids, mask, ngram=2))


def test_large_ids_are_distinguished() -> None:
    big = 2**32 - 1
    assert packed([[big, 0, big, 0], [big, 0, 0, big]], ngram=2) == pytest.approx([-1 / 3, 0])
    assert packed([[0, 1, 1, 0, 0, 2]], ngram=2) == [0]


@given(st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=4), st.integers(1, 5))
def test_repetition_penalty_counts_as_sets_of_tuples_do(rows: list[list[int]], ngram: int) -> None:
    want = []
    for row in rows:
        grams = [tuple(row[i : i + ngram]) for i in range(len(row) - ngram + 1)]
        want.append(len(set(grams)) / len(grams) - 1 if grams else 0)
    assert packed(rows, ngram=ngram) == pytest.approx(want)
    width = max(map(len, rows)) + 2
    ids = torch.tensor([[1] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    assert repetition_penalty(ids, mask, ngram=ngram).tolist() == pytest.approx(want)


@pytest.mark.parametrize("wrong", [{"ngram": 0}, {"penalty_factor": -1.0}])
def test_values_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"ngram|penalty_factor"):
        packed([[1, 2]], **wrong)


def test_ids_are_integers() -> None:
    with pytest.raises(ValueError, match="responses has dtype"):
        repetition_penalty(torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool))
