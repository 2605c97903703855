"""Groups in which any reward teaches."""

import pytest
import torch

from rlprims.advantage import gdpo
from rlprims.filters import varied_components, varied_scores
from rlprims.testing import check_filter
from tests.records import Record

RECORDS = [
    Record(
        "filters.varied_components",
        check_filter,
        matters={"tolerance": 0.9},
        exempt={"wrong shapes are refused": "one reward more is as good"},
    ),
]

NAN = float("nan")


def test_a_group_whose_sums_are_equal_is_kept() -> None:
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.1, 0.3], [0.1, 0.2]])
    ids = torch.tensor([0, 0, 1, 1, 2, 2])
    assert varied_components(scores, ids).tolist() == [True, True, False, False, True, True]
    assert varied_scores(scores.sum(1), ids)[:2].tolist() == [False, False]


def test_varied_components_keeps_exactly_what_gdpo_learns_from() -> None:
    """Unequal weights, since ±z and ∓z of equal weights may cancel."""
    scores = torch.randint(2, (60, 3), generator=torch.Generator().manual_seed(0)).double()
    ids = torch.arange(30).repeat(2)
    a = gdpo(scores, ids, torch.ones(60, 1, dtype=torch.bool), weights=(1.0, 2.3, 5.9), whiten_over="none")[:, 0]
    taught = torch.zeros(30).index_add(0, ids, a.abs().float())[ids] > 0
    assert torch.equal(varied_components(scores, ids), taught)
    assert 0 < int(taught.sum()) < 60


def test_one_unknown_reward_drops_the_group() -> None:
    scores = torch.tensor([[1.0, NAN], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    assert varied_components(scores, torch.tensor([0, 0, 1, 1])).tolist() == [False, False, True, True]


@pytest.mark.parametrize("scores", [torch.zeros(2), torch.zeros(3, 2), torch.zeros(2, 0), torch.zeros(2, 2, 1)])
def test_wrong_shapes_are_refused(scores: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="component_scores has shape"):
        varied_components(scores, torch.tensor([0, 0]))
