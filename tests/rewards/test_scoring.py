"""Scores in process: one for each row, whatever the verifier does."""

import math

import pytest
import torch

from rlprims.rewards.scoring import Cause, Failure, batch, naive
from tests.rewards.misbehaving import obey, sourced


def test_numbers_and_columns() -> None:
    scores = naive(obey, ["1", "pred", "2.5"], ["", "", ""])
    assert scores.scores.tolist() == [1.0, 1.0, 2.5]
    assert scores.scores.dtype == torch.float32
    assert set(scores.columns) == {"acc"}  # the parsed text is no number
    assert scores.columns["acc"].isnan().tolist() == [True, False, True]
    assert scores.failures == [None, None, None]
    assert scores.causes == {}


@pytest.mark.parametrize(
    ("response", "cause"),
    [
        ("None", "returned None"),
        ("nan", "returned nan"),
        ("inf", "returned inf"),
        ("text", "returned str"),
        ("list", "returned list"),
        ("no score", "returned no score"),
        ("raise", "raised RuntimeError"),
        ("alarm", "raised Alarm"),
    ],
)
def test_a_row_without_a_score_costs_itself(response: str, cause: str) -> None:
    scores = naive(obey, ["1", response, "2"], ["", "", ""])
    assert scores.scores[0] == 1
    assert scores.scores[2] == 2
    assert math.isnan(scores.scores[1])
    failure = scores.failures[1]
    assert failure is not None
    assert failure.cause == cause


@pytest.mark.parametrize("response", ["numpy", "bool"])
def test_naive_takes_scores_of_other_number_types(response: str) -> None:
    assert naive(obey, [response], [""]).scores.tolist() == [1.0]


def test_causes_are_counted_with_the_first_example() -> None:
    scores = naive(obey, ["raise", "1", "nan", "raise"], [""] * 4)
    assert scores.causes == {
        "raised RuntimeError": Cause(2, 0, "cannot read this"),
        "returned nan": Cause(1, 2, ""),
    }


def test_an_interrupt_is_not_a_failure() -> None:
    def interrupted(response: str, answer: str) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        naive(interrupted, [""], [""])


def test_columns_of_the_data() -> None:
    assert naive(sourced, ["", ""], ["", ""], {"data_source": ["a", "bcd"], "other": [1, 2]}).scores.tolist() == [1, 3]
    with pytest.raises(ValueError, match=r"needs the columns \['data_source'\]; extra has \['other'\]"):
        naive(sourced, [""], [""], {"other": [1]})


def test_data_of_another_length() -> None:
    with pytest.raises(ValueError, match="answers has 1 rows and responses has 2"):
        naive(obey, ["1", "2"], [""])


def test_a_verifier_of_lists() -> None:
    scores = batch(lambda responses, answers: [1.0, None, {"score": 2, "acc": 1}], ["a", "b", "c"], [""] * 3)
    assert scores.scores[[0, 2]].tolist() == [1.0, 2.0]
    assert scores.failures[1] == Failure("returned None", "None")


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_list_of_another_length_scores_nothing(count: int) -> None:
    scores = batch(lambda responses, answers: [1.0] * count, ["a", "b", "c"], [""] * 3)
    assert scores.scores.isnan().all()
    assert scores.causes == {"wrong length": Cause(3, 0, f"{count} results for 3 rows")}


def test_a_verifier_of_lists_that_raises() -> None:
    def fails(responses: list[str], answers: list[str]) -> list[float]:
        raise OSError("no server")

    assert batch(fails, ["a", "b"], ["", ""]).causes == {"raised OSError": Cause(2, 0, "no server")}


def test_naive_of_no_rows() -> None:
    for scores in (naive(obey, [], []), batch(lambda responses, answers: [], [], [])):
        assert scores.scores.shape == (0,)
