"""Soft overlong punishment."""

import pytest
import torch

from rlprims.rewards import overlong_penalty
from rlprims.testing import check_reward
from tests.records import Record

RECORDS = [
    Record(
        "rewards.overlong_penalty",
        check_reward,
        call={"max_length": 5, "buffer_length": 3},
        matters={"max_length": 4, "buffer_length": 2, "penalty_factor": 0.5},
    ),
    Record("rewards.overlong_penalty", check_reward, call={"max_length": 3, "buffer_length": 0}),
]


def of(*lengths: int, **hyperparameters: float) -> list[float]:
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return overlong_penalty(mask, **hyperparameters).tolist()


def test_the_ramp_and_what_lies_beyond() -> None:
    got = of(0, 79, 80, 81, 90, 100, 101, 140, max_length=100, buffer_length=20)
    assert got == pytest.approx([0, 0, 0, -0.05, -0.5, -1, -1, -1])


def test_the_factor_scales_and_bounds() -> None:
    assert of(90, 140, max_length=100, buffer_length=20, penalty_factor=3.0) == pytest.approx([-1.5, -3])


def test_overlong_penalty_without_buffer_is_a_step() -> None:
    assert of(11, 12, 13, 20, max_length=12, buffer_length=0) == [0, 0, -1, -1]


def test_a_buffer_of_one() -> None:
    assert of(11, 12, 13, max_length=12, buffer_length=1) == [0, -1, -1]


def test_tool_tokens_do_not_count() -> None:
    mask = torch.tensor([[True] * 4 + [False] * 6 + [True] * 2])
    assert overlong_penalty(mask, max_length=8, buffer_length=4).tolist() == [-0.5]


def test_packed() -> None:
    mask = torch.ones(13, dtype=torch.bool)
    got = overlong_penalty(mask, torch.tensor([0, 3, 3, 13]), max_length=8, buffer_length=4)
    assert got.tolist() == [0, 0, -1]


@pytest.mark.parametrize(
    ("wrong", "blamed"),
    [
        ({"max_length": 10, "buffer_length": 11}, "buffer_length"),
        ({"max_length": 10, "buffer_length": -1}, "buffer_length"),
        ({"max_length": 0, "buffer_length": 0}, "max_length"),
        ({"max_length": 10, "buffer_length": 2, "penalty_factor": -1.0}, "penalty_factor"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(wrong: dict[str, float], blamed: str) -> None:
    with pytest.raises(ValueError, match=blamed):
        of(5, **wrong)
