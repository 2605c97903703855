"""maj@k, by every choice of k responses."""

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlprims.diagnostics import majority_at_k
from rlprims.grouping import dense_ids


def of_one_prompt(answers: Sequence[Hashable | None], scores: Sequence[float], k: int) -> float:
    ids = dense_ids(answers).where(torch.tensor([answer is not None for answer in answers]), -1)
    metric = majority_at_k(ids, torch.tensor(scores), torch.zeros(len(answers), dtype=torch.int64), k=k)
    assert metric.count == 1
    return float(metric.value())


def by_every_choice(answers: list[str | None], right: dict[str, float], k: int) -> float:
    total = []
    for choice in combinations(answers, k):
        votes = Counter(answer for answer in choice if answer is not None)
        first = [answer for answer, count in votes.items() if count == max(votes.values())]
        total.append(sum(right[answer] for answer in first) / len(first) if first else 0.0)
    return sum(total) / len(total)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=8), st.data())
def test_majority_at_k_is_the_mean_over_every_choice(answers: list[str | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    right = {"a": 1.0, "b": 0.0, "c": 0.5, "d": 0.0}
    scores = [0.0 if answer is None else right[answer] for answer in answers]
    assert of_one_prompt(answers, scores, k) == pytest.approx(by_every_choice(answers, right, k))


def test_majority_at_k_by_hand() -> None:
    """Of 4 4 4 5 5: among the ten threes seven have two or three 4."""
    answers, right = ["4", "4", "4", "5", "5"], [1.0, 1.0, 1.0, 0.0, 0.0]
    assert [of_one_prompt(answers, right, k) for k in (1, 3, 5)] == pytest.approx([0.6, 0.7, 1.0])
    assert of_one_prompt(["4", "5"], [1.0, 0.0], 2) == 0.5  # a tie
    assert of_one_prompt([None, None, "4"], [0.0, 0.0, 1.0], 2) == pytest.approx(2 / 3)
    assert of_one_prompt(["4", "4"], [1.0, 0.0], 2) == 0.5  # one answer with two scores: their mean


def test_majority_at_k_of_many_samples() -> None:
    answers = [i % 7 if i % 3 else 0 for i in range(64)]
    got = [of_one_prompt(answers, [float(a == 0) for a in answers], k) for k in (1, 8, 32, 64)]
    assert got == sorted(got)
    assert got[-1] == 1.0


def test_majority_at_k_does_not_count_a_prompt_of_fewer_than_k() -> None:
    answers, scores = torch.tensor([7, 8, 8]), torch.tensor([0.0, 1.0, 1.0])
    got = majority_at_k(answers, scores, torch.tensor([0, 1, 1]), k=2)
    assert (got.value(), got.count) == (1, 1)


@pytest.mark.parametrize(
    ("answers", "k", "message"),
    [
        (torch.tensor([1, 2]), 0, "k=0, expected at least 1"),
        (torch.tensor([1, 2, 3]), 1, r"answers has shape \(3,\)"),
        (torch.tensor([1.0, 2.0]), 1, "answers has dtype torch.float32"),
    ],
)
def test_majority_at_k_refuses(answers: torch.Tensor, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        majority_at_k(answers, torch.zeros(2), torch.tensor([0, 0]), k=k)
