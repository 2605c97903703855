"""A linear map and a clip of the score."""

import math

import pytest
import torch

from rlprims.rewards import rescale
from rlprims.testing import check_reward
from tests.records import Record

RECORDS = [
    Record(
        "rewards.rescale",
        check_reward,
        call={"low": -1.0, "high": 2.0},
        matters={"shift": 0.5, "scale": 2.0, "low": -0.1, "high": 0.1},
    ),
]


def shaped(*scores: float, **hyperparameters: float) -> list[float]:
    s = torch.tensor(scores, dtype=torch.float64)
    return (s + rescale(s, **hyperparameters)).tolist()


def test_only_the_clip_by_default() -> None:
    assert shaped(-1e6, -10.0, 0.3, 25.0) == [-10, -10, 0.3, 10]


def test_shift_then_scale_then_clip() -> None:
    assert shaped(0.0, 1.0, 9.0, shift=-0.5, scale=10.0, low=-math.inf, high=20.0) == [-5, 5, 20]


def test_one_range_onto_another() -> None:
    """[0, 5] onto [−1, 1], as NeMo-RL's scaling with a source and a target range."""
    assert shaped(0.0, 2.5, 5.0, 8.0, shift=-2.5, scale=0.4, low=-1.0, high=1.0) == pytest.approx([-1, 0, 1, 1])


@pytest.mark.parametrize("wrong", [{"scale": 0.0}, {"scale": -1.0}, {"low": 1.0, "high": 1.0}, {"low": math.nan}])
def test_values_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"scale|low"):
        shaped(1.0, **wrong)


def test_one_score_per_response() -> None:
    with pytest.raises(ValueError, match=r"scores has shape \(2, 3\)"):
        rescale(torch.zeros(2, 3))
