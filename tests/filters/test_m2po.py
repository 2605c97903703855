"""The most tokens whose squared log-ratios have a small mean."""

import pytest
import torch

from rlprims.filters import m2po
from rlprims.testing import check_selector
from tests.records import Record, many_more

RECORDS = [
    Record("filters.m2po", check_selector, matters={"tau": 1.0, "all_reduce": many_more}),
]

GENERATOR = torch.Generator().manual_seed(0)


def kept(*differences: float, **options: float) -> list[bool]:
    x = torch.tensor([differences], dtype=torch.float64)
    return m2po(x - 1, torch.full_like(x, -1.0), torch.ones_like(x, dtype=torch.bool), **options)[0].tolist()


@pytest.mark.parametrize(
    ("tau", "want"),
    [
        (1.0, [True, True, True, True]),  # mean square of 0, 0.1, −0.3, 1: 0.275
        (0.2, [True, True, True, False]),  # 0.0333
        (0.03, [True, True, False, False]),  # 0.005
        (0.004, [True, False, False, False]),
    ],
)
def test_by_hand(tau: float, want: list[bool]) -> None:
    assert kept(0.0, 0.1, -0.3, 1.0, tau=tau) == want


def test_m2po_keeps_as_many_tokens_as_it_may() -> None:
    """Against dropping the largest, one by one."""
    for tau in (0.001, 0.04, 0.3, 2.0):
        x = torch.randn(1, 97, generator=GENERATOR, dtype=torch.float64)
        left = sorted(x.square().flatten().tolist())
        while left and sum(left) / len(left) > tau:
            left.pop()
        keep = m2po(x, torch.zeros_like(x), torch.ones_like(x, dtype=torch.bool), tau=tau)
        assert sorted(x[keep].square().tolist()) == pytest.approx(left)


def test_ties_share_their_fate() -> None:
    assert kept(0.0, 0.5, -0.5, 0.5, tau=0.15) == [True, False, False, False]


def test_m2po_may_keep_nothing() -> None:
    assert kept(1.0, 2.0) == [False, False]


def test_padding_is_no_token() -> None:
    """Three zeros more would let the far token in."""
    x = torch.tensor([[0.0, 0.3, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False, False, False]])
    assert m2po(x, torch.zeros_like(x), mask).tolist() == [[True, False, False, False, False]]


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="tau"):
        kept(0.0, tau=-0.1)
