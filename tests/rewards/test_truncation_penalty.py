"""What a response that did not end by itself loses."""

import pytest
import torch

from rlprims.ended import Ended
from rlprims.rewards import truncation_penalty
from rlprims.testing import check_reward
from tests.records import Record

RECORDS = [
    Record(
        "rewards.truncation_penalty",
        check_reward,
        call={"scale": 0.5, "penalty": 0.2},
        matters={"scale": 0.3, "penalty": 1.0, "reasons": ("context",)},
    ),
]

SCORES = torch.tensor([1.0, 1.0, 0.0, -2.0])
ENDED = torch.tensor([Ended.STOP, Ended.LENGTH, Ended.LENGTH, Ended.LENGTH])


def shaped(**hyperparameters: float) -> list[float]:
    return (SCORES + truncation_penalty(SCORES, ENDED, **hyperparameters)).tolist()


def test_a_constant_for_the_missing_end() -> None:
    assert shaped(penalty=1.0) == [1, 0, -1, -3]


def test_a_factor_takes_from_right_answers_only() -> None:
    assert shaped(scale=0.25) == [1, 0.25, 0, -0.5]


def test_an_override() -> None:
    assert shaped(scale=0.0, penalty=1.0) == [1, -1, -1, -1]


def test_an_unknown_score_stays_unknown_only_where_it_is() -> None:
    got = truncation_penalty(torch.tensor([torch.nan, torch.nan]), ENDED[:2], scale=0.5)
    assert got.isnan().tolist() == [False, True]


@pytest.mark.parametrize(
    ("wrong", "blamed"),
    [
        ({}, "change nothing"),
        ({"scale": -0.5}, "scale=-0.5"),
        ({"scale": 1.5}, "scale"),
        ({"penalty": -1.0}, "penalty"),
    ],
)
def test_values_that_make_no_sense_are_refused(wrong: dict[str, float], blamed: str) -> None:
    with pytest.raises(ValueError, match=blamed):
        shaped(**wrong)


def test_truncation_penalty_is_for_other_reasons_if_they_are_named() -> None:
    ended = torch.tensor([Ended.STOP, Ended.CONTEXT, Ended.LENGTH, Ended.PARSE_ERROR])
    got = truncation_penalty(SCORES, ended, penalty=1.0, reasons=("context", "parse_error"))
    assert got.tolist() == [0, -1, 0, -1]


def test_a_flag_is_no_reason() -> None:
    with pytest.raises(ValueError, match=r"ended has shape .* expected integers"):
        truncation_penalty(SCORES, ENDED.bool(), penalty=1.0)
