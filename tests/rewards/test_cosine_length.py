"""The score along a cosine of the length."""

import pytest
import torch

from rlprims.rewards import cosine_length
from rlprims.testing import check_reward
from tests.records import Record

RECORDS = [
    Record(
        "rewards.cosine_length",
        check_reward,
        call={"max_length": 5},
        matters={
            "max_length": 7,
            "correct_short": 2.0,
            "correct_long": 0.2,
            "wrong_short": -3.0,
            "wrong_long": -0.1,
            "correct_above": 0.0,
        },
    ),
]


def mask_of(*lengths: int) -> torch.Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


LENGTHS = (25, 50, 100, 130)


def new_scores(score: float, **hyperparameters: float) -> list[float]:
    scores = torch.full((4,), score, dtype=torch.float64)
    return (scores + cosine_length(scores, mask_of(*LENGTHS), max_length=100, **hyperparameters)).tolist()


def test_as_trl() -> None:
    """TRL 1.16.0 for lengths 25, 50 and 130; at 100 the schedule has ended."""
    assert new_scores(1.0) == pytest.approx([0.9267766952966369, 0.75, 0.5, 0.5])
    assert new_scores(0.0) == pytest.approx([-0.9267766952966369, -0.75, -0.5, -0.5])


def test_cosine_length_of_other_values_is_trls() -> None:
    """TRL 1.16.0 with values (−10, 0) for wrong and (1, 2) for right answers."""
    other = {"correct_short": 2.0, "correct_long": 1.0, "wrong_short": -10.0, "wrong_long": 0.0}
    assert new_scores(1.0, **other) == pytest.approx([1.8535533905932737, 1.5, 1.0, 1.0])
    assert new_scores(0.0, **other) == pytest.approx([-8.535533905932738, -5.0, 0.0, 0.0])


def test_the_old_score_is_replaced() -> None:
    for score in (0.6, 1.0, 17.0):
        assert new_scores(score) == pytest.approx(new_scores(1.0))


def test_an_unknown_score_stays_unknown() -> None:
    assert cosine_length(torch.tensor([torch.nan]), mask_of(3), max_length=4).isnan().all()


def test_an_empty_response_keeps_its_score() -> None:
    assert cosine_length(torch.tensor([1.0, 1.0]), mask_of(0, 8), max_length=8).tolist() == [0, -0.5]


def test_no_length_is_refused() -> None:
    with pytest.raises(ValueError, match="max_length"):
        cosine_length(torch.ones(1), mask_of(1), max_length=0)
