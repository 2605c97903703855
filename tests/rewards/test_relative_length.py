"""Short or long beside the other answers to the prompt."""

import pytest
import torch

from rlprims.rewards import relative_length
from rlprims.testing import check_reward
from tests.records import Record

RECORDS = [
    Record("rewards.relative_length", check_reward, matters={"weight": 0.5, "correct_above": 0.0}),
]


def mask_of(*lengths: int) -> torch.Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def ids(*labels: int) -> torch.Tensor:
    return torch.tensor(labels)


def test_right_answers_gain_and_lose_a_half() -> None:
    got = relative_length(torch.ones(4), ids(0, 0, 0, 0), mask_of(10, 20, 30, 50))
    assert got.tolist() == pytest.approx([0.5, 0.25, 0.0, -0.5])


def test_wrong_answers_gain_nothing() -> None:
    got = relative_length(torch.tensor([0.0, 1.0, 0.0, 0.0]), ids(0, 0, 0, 0), mask_of(10, 20, 30, 50))
    assert got.tolist() == pytest.approx([0.0, 0.25, 0.0, -0.5])


def test_groups_of_one_length_and_of_one_response_get_nothing() -> None:
    got = relative_length(torch.ones(5), ids(0, 0, 1, 2, 2), mask_of(7, 7, 9, 1, 2))
    assert got.tolist() == [0, 0, 0, 0.5, -0.5]


def test_an_empty_response_is_not_the_shortest() -> None:
    got = relative_length(torch.ones(3), ids(0, 0, 0), mask_of(0, 10, 20))
    assert got.tolist() == [0, 0.5, -0.5]


def test_tool_tokens_do_not_count() -> None:
    mask = torch.tensor([[True, False, False, True], [True, True, True, False]])
    assert relative_length(torch.ones(2), ids(0, 0), mask).tolist() == [0.5, -0.5]


def test_scores_of_plus_and_minus_one_and_a_threshold() -> None:
    scores = torch.tensor([1.0, -1.0, 0.1, 1.0])
    assert relative_length(scores, ids(0, 0, 0, 0), mask_of(2, 2, 2, 4)).tolist() == [0.5, 0, 0, -0.5]
    got = relative_length(scores, ids(0, 0, 0, 0), mask_of(2, 2, 2, 4), correct_above=0.0, weight=2.0)
    assert got.tolist() == [1, 0, 1, -1]


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        relative_length(torch.ones(1), ids(0), mask_of(1), weight=-1.0)
