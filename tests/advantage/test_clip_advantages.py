"""Bounds on advantages."""

import math

import pytest
import torch

from rlprims.advantage import clip_advantages
from rlprims.testing import check_advantage
from tests.records import Record

RECORDS = [
    Record(
        "advantage.clip_advantages",
        check_advantage,
        call={"low": -0.5, "high": 0.8},
        matters={"low": -0.2, "high": 0.3},
    ),
    Record("advantage.clip_advantages", check_advantage, call={"low": 0.1, "high": 0.8}),
]

ADVANTAGES = torch.tensor([[-9.0, 0.5, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True, False]])


@pytest.mark.parametrize(
    ("low", "high", "want"),
    [(-5, 2, [-5, 0.5, 2, 0]), (-math.inf, 2, [-9, 0.5, 2, 0]), (1, 2, [1, 1, 2, 0]), (0, 0, [0, 0, 0, 0])],
)
def test_bounds(low: float, high: float, want: list[float]) -> None:
    assert clip_advantages(ADVANTAGES, MASK, low=low, high=high)[0].tolist() == want


def test_twice_is_once() -> None:
    once = clip_advantages(ADVANTAGES, MASK, low=-1.0, high=1.0)
    torch.testing.assert_close(clip_advantages(once, MASK, low=-1.0, high=1.0), once, rtol=0, atol=0)


def test_bounds_the_wrong_way_round_are_refused() -> None:
    with pytest.raises(ValueError, match=r"low=1\.0 and high=-1\.0, expected"):
        clip_advantages(ADVANTAGES, MASK, low=1.0, high=-1.0)
    with pytest.raises(ValueError, match="low=nan"):
        clip_advantages(ADVANTAGES, MASK, low=math.nan, high=1.0)
