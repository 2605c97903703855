"""Several rewards into one score."""

import pytest
import torch

from rlprims.filters import finite_scores
from rlprims.rewards import weighted_score
from rlprims.testing import check_reward
from tests.records import Record

RECORDS = [
    Record("rewards.weighted_score", check_reward, call={"weights": (1.0, 0.5)}, matters={"weights": (1.0, 2.0)}),
    Record("rewards.weighted_score", check_reward),
]

NAN = float("nan")


def test_weights() -> None:
    scores = torch.tensor([[1.0, 10.0], [0.0, -2.0]])
    assert weighted_score(scores).tolist() == [11, -2]
    assert weighted_score(scores, weights=(2.0, 0.5)).tolist() == [7, -1]


def test_a_reward_that_does_not_apply_is_left_out() -> None:
    scores = torch.tensor([[1.0, NAN, 3.0], [NAN, 5.0, NAN]])
    assert weighted_score(scores, weights=(1.0, 10.0, 0.5)).tolist() == [2.5, 50]


def test_a_response_without_any_score_is_unknown_and_its_group_is_dropped() -> None:
    scores = weighted_score(torch.tensor([[NAN, NAN], [1.0, 0.0], [1.0, NAN], [0.0, NAN]]))
    assert scores.isnan().tolist() == [True, False, False, False]
    assert finite_scores(scores, torch.tensor([0, 0, 1, 1])).tolist() == [False, False, True, True]


def test_infinity_is_not_hidden() -> None:
    assert weighted_score(torch.tensor([[float("inf"), 1.0]])).tolist() == [float("inf")]


def test_no_gradient_comes_from_what_does_not_apply() -> None:
    scores = torch.tensor([[1.0, NAN]], requires_grad=True)
    weighted_score(scores, weights=(2.0, 3.0)).sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[2, 0]]


@pytest.mark.parametrize(
    ("scores", "weights", "blamed"),
    [
        (torch.zeros(3), None, r"component_scores has shape \(3,\)"),
        (torch.zeros(3, 2), (1.0,), "2 columns and weights has 1 entries"),
    ],
)
def test_wrong_shapes_are_refused(scores: torch.Tensor, weights: tuple[float, ...] | None, blamed: str) -> None:
    with pytest.raises(ValueError, match=blamed):
        weighted_score(scores, weights=weights)
