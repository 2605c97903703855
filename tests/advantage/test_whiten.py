"""Whitening over the batch, on one rank and on two."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from rlprims.advantage import whiten
from rlprims.testing import check_advantage
from tests.records import STATISTICS_OF_THE_BATCH, Record, doubled

RECORDS = [
    Record(
        "advantage.whiten",
        check_advantage,
        matters={"ddof": 0, "eps": 0.1, "all_reduce": doubled},
        exempt=STATISTICS_OF_THE_BATCH,
    ),
]


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def full(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bool)


@pytest.mark.parametrize(
    ("ddof", "want"), [(0, [-1.06904497, -0.26726124, 1.33630621]), (1, [-0.8729, -0.2182, 1.0911])]
)
def test_three_numbers(ddof: int, want: list[float]) -> None:
    assert whiten(row(1, 2, 4), full(1, 3), ddof=ddof, eps=0.0)[0].tolist() == pytest.approx(want, abs=5e-5)


def test_mean_zero_and_variance_one_over_valid_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 40 + 7 * torch.randn(9, 11, generator=generator, dtype=torch.float64)
    mask = torch.rand(9, 11, generator=generator) < 0.6
    got = whiten(x, mask)
    assert got[mask].mean().abs() < 1e-12
    assert got[mask].var() == pytest.approx(1)
    assert (got[~mask] == 0).all()


def test_a_large_offset_does_not_eat_the_variance() -> None:
    x = torch.tensor([[1.0, 2.0, 4.0]])
    torch.testing.assert_close(whiten(x + 1e5, full(1, 3)), whiten(x, full(1, 3)), rtol=1e-5, atol=0)


def test_whiten_of_no_and_one_token_is_zero() -> None:
    x = row(3, 4, 5)
    assert whiten(x, torch.zeros(1, 3, dtype=torch.bool)).tolist() == [[0, 0, 0]]
    assert whiten(x, torch.tensor([[False, True, False]])).tolist() == [[0, 0, 0]]


def test_whiten_of_one_token_is_zero_even_without_epsilon() -> None:
    assert whiten(torch.tensor([[3.0, 9.0]]), torch.tensor([[True, False]]), eps=0.0).tolist() == [[0.0, 0.0]]


def test_two_tokens() -> None:
    got = whiten(row(3, 9, 5), torch.tensor([[True, False, True]]), eps=0.0)
    assert got[0].tolist() == pytest.approx([-(0.5**0.5), 0, 0.5**0.5])


def test_equal_advantages_give_zero() -> None:
    for number in (0.1, 1000.1, -1e6 / 3):
        assert whiten(torch.full((3, 3), number), full(3, 3)).abs().max() < 1e-6


class Ranks:
    """Threads that hear the sum of what all of them say, as ranks do."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=10)
        self.said = [torch.empty(0)] * count

    def all_reduce(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        self.said[rank] = x
        self.barrier.wait()
        total = torch.stack(self.said).sum(0)
        self.barrier.wait()
        return total


def test_two_ranks_agree_with_one() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 4, generator=generator) < 0.7
    mask[4:] = False  # the last rank has nothing valid, and still takes part
    ranks, rows = Ranks(3), [slice(0, 1), slice(1, 4), slice(4, 6)]

    def whiten_on(rank: int) -> torch.Tensor:
        return whiten(x[rows[rank]], mask[rows[rank]], all_reduce=partial(ranks.all_reduce, rank))

    with ThreadPoolExecutor(3) as pool:
        got = torch.cat(list(pool.map(whiten_on, range(3))))
    torch.testing.assert_close(got, whiten(x, mask), rtol=0, atol=1e-12)
