"""Which tokens, turns and responses are kept, by ratio and by divergence."""

import math

import pytest
import torch

from rlprims.corrections import rejection
from rlprims.testing import check_weights
from tests.records import BY_SEGMENT, Record, one_more

RECORDS = [
    Record(
        "corrections.rejection",
        check_weights,
        matters={"level": "token", "statistic": "max", "high": 0.003, "all_reduce_rows": one_more},
    ),
    Record(
        "corrections.rejection",
        check_weights,
        call={"estimator": "k1", "level": "segment", "statistic": "sum", "high": 1.2},
        matters={"estimator": "k2", "low": 0.95, "level": "sequence", "statistic": "mean"},
        exempt=BY_SEGMENT,
    ),
    Record("corrections.rejection", check_weights, call={"estimator": "k2", "level": "token"}, matters={"high": 0.003}),
    Record(
        "corrections.rejection",
        check_weights,
        call={"level": "segment", "statistic": "max"},
        matters={"level": "sequence"},
        exempt=BY_SEGMENT,
    ),
]

K1 = {"estimator": "k1", "statistic": "sum"}


def kept(*responses: list[float], turn_ids: torch.Tensor | None = None, **options) -> list[list[float]]:
    """Of responses of one length, with these ratios of trainer to sampler."""
    x = torch.tensor(responses, dtype=torch.float64).log()
    mask = torch.ones_like(x, dtype=torch.bool)
    return rejection(x, torch.zeros_like(x), mask, None, turn_ids, **options).values.tolist()


def test_the_bounds_of_k1_are_of_the_trainer_over_the_sampler() -> None:
    """verl's "0.5_5.0" keeps 0.2 to 2."""
    got = kept([0.19, 0.3, 0.49, 0.51, 1.0, 4.9, 5.1], estimator="k1", level="token", low=0.5, high=5.0)
    assert got == [[0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]]


def test_rejection_without_low_takes_any_small_ratio() -> None:
    assert kept([1e-9, 1.0, 2.1], estimator="k1", level="token", high=2.0) == [[1.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"estimator": "k1", "statistic": "sum", "low": 0.5, "high": 2.0}, [1.0, 1.0, 0.0]),  # 1, 1.9, 0.4
        ({"estimator": "k1", "statistic": "mean", "low": 0.5, "high": 1.3}, [1.0, 0.0, 1.0]),  # 1, 1.38, 0.63
        ({"estimator": "k1", "statistic": "max", "low": 0.3, "high": 2.0}, [0.0, 1.0, 1.0]),  # 4, 1.9, 1
        ({"estimator": "k2", "statistic": "sum", "high": 0.5}, [0.0, 1.0, 1.0]),  # 1.92, 0.206, 0.42
        ({"estimator": "k2", "statistic": "mean", "high": 0.15}, [0.0, 1.0, 0.0]),  # 0.96, 0.103, 0.21
        ({"estimator": "k3", "statistic": "max", "high": 0.3}, [0.0, 1.0, 0.0]),  # 1.61, 0.258, 0.316
        ({"estimator": "k3", "statistic": "mean", "high": 0.16}, [0.0, 1.0, 1.0]),  # 1.125, 0.129, 0.158
    ],
)
def test_responses_by_hand(options: dict, want: list[float]) -> None:
    assert [row[0] for row in kept([4.0, 0.25], [1.9, 1.0], [0.4, 1.0], **options)] == want


def test_turns() -> None:
    turns = torch.tensor([[0, 0, 1, 1, 0, 0]])
    got = kept([4.0, 0.25, 3.0, 1.0, 0.25, 1.0], turn_ids=turns, level="segment", low=0.5, high=2.0, **K1)
    assert got == [[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]]


def test_a_tool_token_is_not_asked() -> None:
    x = torch.tensor([[0.0, 30.0, 0.0]])
    mask = torch.tensor([[True, False, True]])
    assert rejection(x, torch.zeros(1, 3), mask).values.tolist() == [[1.0, 0.0, 1.0]]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_unknown_and_impossible_tokens_are_rejected(estimator: str) -> None:
    trainer = torch.tensor([[torch.nan], [-torch.inf], [-1.0]])
    got = rejection(
        trainer,
        torch.full((3, 1), -1.0),
        torch.ones(3, 1, dtype=torch.bool),
        estimator=estimator,
        high=2.0,
        low=0.1 if estimator == "k1" else None,
    )
    assert got.values.tolist() == [[0.0], [0.0], [1.0]]


def test_rejection_accounts_for_no_gap_and_has_no_gradient() -> None:
    x = torch.zeros(1, 2, requires_grad=True)
    got = rejection(x, x + 1, torch.ones(1, 2, dtype=torch.bool), high=math.inf)
    assert got.corrected == frozenset()
    assert not got.values.requires_grad


@pytest.mark.parametrize(
    ("blamed", "options"),
    [
        ("estimator", {"estimator": "k4"}),
        ("level", {"level": "turn"}),
        ("statistic", {"statistic": "median"}),
        ("low", {"low": 0.5}),
        ("high", {"high": -0.1}),
        ("high", {"estimator": "k1", "high": 0.9}),
        ("low", {"estimator": "k1", "low": 1.1, "high": 2.0}),
    ],
)
def test_rejection_refuses_bounds_that_reject_equal_policies(blamed: str, options: dict) -> None:
    with pytest.raises(ValueError, match=blamed):
        kept([1.0], **options)
