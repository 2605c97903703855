"""Padded and packed sequences."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims import layout
from rlprims.layout import (
    expand_to_tokens,
    last_token,
    lengths_of_tokens,
    pack,
    sequence_ids,
    sequence_lengths,
    sequence_sum,
    to_tokens,
    unpack,
)

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=7)


def boundaries(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@given(LENGTHS, st.integers(0, 2**31))
def test_each_sequence_keeps_its_own(lengths: list[int], seed: int) -> None:
    """Packed results against a plain loop over the sequences, empty ones included."""
    generator = torch.Generator().manual_seed(seed)
    cu, n = boundaries(lengths), sum(lengths)
    x = torch.randn(n, generator=generator, dtype=torch.float64)
    mask = torch.rand(n, generator=generator) < 0.6
    pieces = [(x[a:b], mask[a:b]) for a, b in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)]
    sums = [y[m].sum().item() for y, m in pieces]
    assert sequence_ids(cu, n).tolist() == [i for i, length in enumerate(lengths) for _ in range(length)]
    assert sequence_sum(x, mask, cu).tolist() == pytest.approx(sums)
    assert sequence_lengths(mask, cu).tolist() == [int(m.sum()) for _, m in pieces]
    expanded = [s for s, (y, _) in zip(sums, pieces, strict=True) for _ in y]
    assert expand_to_tokens(torch.tensor(sums), mask, cu).tolist() == pytest.approx(expanded)
    counts = [max(int(m.sum()), 1) for _, m in pieces for _ in m]
    assert lengths_of_tokens(mask, cu).tolist() == counts
    last = last_token(mask, cu)
    for (_, m), got in zip(pieces, last.split(lengths), strict=True):
        want = torch.zeros_like(m)
        if m.any():
            want[m.nonzero()[-1]] = True
        assert torch.equal(got, want)
        assert torch.equal(last_token(m[None])[0], want)


@given(LENGTHS)
def test_unpacking_undoes_packing(lengths: list[int]) -> None:
    cu = boundaries(lengths)
    tokens = torch.arange(1, sum(lengths) + 1)
    padded = unpack(tokens, cu, width=8, fill=-1)
    assert padded.shape == (len(lengths), 8)
    assert [int((row != -1).sum()) for row in padded] == lengths
    assert torch.equal(pack(padded, cu), tokens)


def test_to_tokens_reads_nothing_of_an_empty_row() -> None:
    got = to_tokens(torch.tensor([1.0, torch.nan]), torch.tensor([[True, False], [False, False]]))
    assert got.tolist() == [[1, 0], [0, 0]]


def test_a_long_packed_sequence_is_summed_without_loss_in_float32() -> None:
    x = torch.full((2**20,), 0.1)
    got = sequence_sum(x, torch.ones_like(x, dtype=torch.bool), torch.tensor([0, 2**20]))
    assert got.dtype is torch.float32
    assert got.item() == pytest.approx(float(x[0]) * 2**20, rel=1e-7)


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        ([0, 2], r"runs from 0 to 2, expected 0 to 4, the number of packed tokens"),
        ([1, 4], r"runs from 1 to 4, expected 0 to 4"),
        ([0, 5], r"runs from 0 to 5, expected 0 to 4"),
        ([0, 3, 1, 4], r"cu_seqlens decreases, expected cumulative lengths"),
    ],
)
def test_boundaries_that_do_not_fit_are_named(cu: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout.check(torch.tensor(cu), 4)


def test_boundaries_that_fit() -> None:
    for cu in ([0, 4], [0, 0, 4, 4], [0, 1, 2, 3, 4]):
        layout.check(torch.tensor(cu), 4)
    layout.check(torch.tensor([0]), 0)
