"""The tokens of a step where the policy was least certain."""

import pytest
import torch

from rlprims.filters import high_entropy
from rlprims.testing import check_selector
from tests.records import Record, many_more

RECORDS = [
    Record("filters.high_entropy", check_selector, matters={"fraction": 0.5, "all_reduce": many_more}),
]

GENERATOR = torch.Generator().manual_seed(0)


def kept(*entropies: float, **options: float) -> list[float]:
    x = torch.tensor([entropies], dtype=torch.float64)
    return x[high_entropy(x, torch.ones_like(x, dtype=torch.bool), **options)].tolist()


@pytest.mark.parametrize("tokens", [1, 2, 3, 10, 11, 101])
@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5, 0.9, 1.0])
def test_high_entropy_takes_the_quantile_of_torch(tokens: int, fraction: float) -> None:
    x = torch.rand(1, tokens, generator=GENERATOR, dtype=torch.float64)
    want = x >= x.quantile(1 - fraction) - 1e-12
    assert torch.equal(high_entropy(x, torch.ones_like(want), fraction=fraction), want)


def test_a_fifth_by_default() -> None:
    assert kept(*range(10)) == [8.0, 9.0]


def test_ties_are_kept_together() -> None:
    assert kept(0.0, 1.0, 1.0, 1.0, fraction=0.4) == [1.0, 1.0, 1.0]


def test_padding_is_not_part_of_the_quantile() -> None:
    x = torch.tensor([[3.0, 1.0, 0.0, 0.0], [2.0, 0.0, 0.0, 9.0]])
    mask = torch.tensor([[True, True, False, False], [True, False, False, False]])
    assert high_entropy(x, mask, fraction=0.5).tolist() == [[True, False, False, False], [True, False, False, False]]


def test_a_micro_batch_of_its_own_has_another_threshold() -> None:
    """Why it is called on the whole step."""
    x, mask = torch.tensor([[0.1, 0.2], [1.0, 2.0]]), torch.ones(2, 2, dtype=torch.bool)
    assert high_entropy(x, mask, fraction=0.5).tolist() == [[False, False], [True, True]]
    assert high_entropy(x[:1], mask[:1], fraction=0.5).any()


@pytest.mark.parametrize("fraction", [0.0, 1.1, -0.2])
def test_a_share_beyond_all_or_nothing_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="fraction"):
        kept(1.0, fraction=fraction)
