"""The advantage of a response moves to the turns that a rubric names."""

import pytest
import torch
from torch import Tensor

from rlprims.advantage import draco
from rlprims.testing import check_advantage
from tests.records import Record

RECORDS = [
    Record("advantage.draco", check_advantage),
]
MASK = torch.tensor([[True, True, False, True, True, True]])
TURNS = torch.tensor([[0, 0, 9, 1, 2, 2]])


def moved(advantage: float, *quality: float) -> list[float]:
    """Of three turns with 2, 1 and 2 tokens."""
    q = torch.tensor([[quality[0]] * 2 + [torch.nan, quality[1]] + [quality[2]] * 2], dtype=torch.float64)
    return draco(torch.full((1, 6), advantage, dtype=torch.float64), q, TURNS, MASK)[0].tolist()


def test_by_hand() -> None:
    """Equation 6: 5 A w / (n Σ w)."""
    assert moved(1.0, 1.0, 0.5, 0.5) == pytest.approx([1.25, 1.25, 0.0, 1.25, 0.625, 0.625])
    assert moved(-2.0, 1.0, 0.5, 0.5) == pytest.approx([0.0, 0.0, 0.0, -5.0, -2.5, -2.5])  # weights 0, ½ and ½


def test_a_turn_that_is_blameless_is_not_punished_and_one_that_failed_is_not_rewarded() -> None:
    assert moved(-1.0, 1.0, 0.0, 1.0) == pytest.approx([0.0, 0.0, 0.0, -5.0, 0.0, 0.0])
    assert moved(1.0, 1.0, 0.0, 1.0) == pytest.approx([1.25, 1.25, 0.0, 0.0, 1.25, 1.25])


@pytest.mark.parametrize(("advantage", "quality"), [(1.0, 0.0), (-1.0, 1.0), (0.0, 0.5)])
def test_without_a_weight_the_advantage_stays(advantage: float, quality: float) -> None:
    assert moved(advantage, quality, quality, quality) == [advantage, advantage, 0.0, *[advantage] * 3]


def test_the_sum_stays_and_so_does_the_sign_and_the_share_of_a_turn_is_that_of_its_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(6, 9, generator=generator) < 0.7
    turns = (torch.rand(6, 9, generator=generator) < 0.4).cumsum(-1)
    q = torch.rand(6, 9, generator=generator, dtype=torch.float64)
    scores = torch.tensor([1.0, -1.0, 2.0, -0.5, 0.3, -3.0], dtype=torch.float64)
    a = torch.where(mask, scores[:, None], 0.0)
    got = draco(a, q, turns, mask)
    torch.testing.assert_close(got.sum(-1), a.sum(-1))
    assert (got * a >= 0).all()
    for row in range(len(mask)):
        weights: dict[int, Tensor] = {}
        for turn in turns[row][mask[row]].unique().tolist():
            here = mask[row] & (turns[row] == turn)
            quality = q[row][here].mean()
            weights[turn] = quality if scores[row] >= 0 else 1 - quality
        for turn, weight in weights.items():
            share = got[row][mask[row] & (turns[row] == turn)].sum()
            torch.testing.assert_close(share, a[row].sum() * weight / sum(weights.values()))


def test_a_quality_outside_of_its_range_is_that_of_the_bound() -> None:
    assert moved(1.0, 2.0, -1.0, 0.5) == moved(1.0, 1.0, 0.0, 0.5)
