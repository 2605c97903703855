"""Weights by sign."""

import pytest
import torch

from rlprims.advantage import weight_by_sign
from rlprims.testing import check_advantage
from tests.records import Record

RECORDS = [
    Record("advantage.weight_by_sign", check_advantage, matters={"positive": 0.0, "negative": 0.5}),
]

ADVANTAGES = torch.tensor([[1.0, -1.0, 0.0, 3.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True, False]])


@pytest.mark.parametrize(
    ("weights", "want"),
    [
        ({}, [0.1, -1, 0, 0]),
        ({"positive": 0.0}, [0, -1, 0, 0]),
        ({"positive": 1.0, "negative": 0.0}, [1, 0, 0, 0]),
        ({"positive": 1.0}, [1, -1, 0, 0]),
    ],
    ids=["weighted", "negative only", "positive only", "unchanged"],
)
def test_signs(weights: dict[str, float], want: list[float]) -> None:
    assert weight_by_sign(ADVANTAGES, MASK, **weights)[0].tolist() == want
