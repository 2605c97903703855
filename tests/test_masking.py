"""Masked statistics, padded and packed."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.layout import last_token, pack, sequence_ids, sequence_lengths, sequence_sum, to_tokens, unpack
from rlprims.masking import (
    check_sequences,
    check_tokens,
    count,
    empty_like,
    masked_mean,
    row_blocks,
    write_zero_outside,
)
from rlprims.ratios import log_ratio

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
    assert sequence_ids(cu, n).tolist() == [i for i, length in enumerate(lengths) for _ in range(length)]
    assert sequence_sum(x, mask, cu).tolist() == pytest.approx([y[m].sum().item() for y, m in pieces])
    assert sequence_lengths(mask, cu).tolist() == [int(m.sum()) for _, m in pieces]
    last = last_token(mask, cu)
    for (_, m), got in zip(pieces, last.split(lengths), strict=True):
        want = torch.zeros_like(m)
        if m.any():
            want[m.nonzero()[-1]] = True
        assert torch.equal(got, want)


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


def test_the_mean_of_nothing_is_zero() -> None:
    assert masked_mean(torch.full((2, 2), torch.nan), torch.zeros(2, 2, dtype=torch.bool)) == 0


def test_the_log_ratio_is_clamped_and_one_sided() -> None:
    new = torch.tensor([0.0, 0.0, -30.0, 5.0], requires_grad=True)
    old = torch.tensor([-1.0, -30.0, 0.0, torch.inf], requires_grad=True)
    got = log_ratio(new, old, torch.tensor([True, True, True, False]))
    got.sum().backward()
    assert got.tolist() == [1, 20, -20, 0]
    assert new.grad.tolist() == [1, 0, 0, 0]
    assert old.grad is None


MASK = torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mask", "cu", "data", "message"),
    [
        (MASK.float(), None, {}, r"response_mask has dtype torch\.float32"),
        (MASK[0], None, {}, r"response_mask has shape \(3,\).*cu_seqlens"),
        (MASK, torch.tensor([0, 6]), {}, r"response_mask has shape \(2, 3\).*cu_seqlens is given"),
        (MASK[0], torch.tensor([0.0, 3.0]), {}, "cu_seqlens"),
        (MASK[0], torch.tensor([[0, 3]]), {}, "cu_seqlens"),
        (MASK, None, {"rewards": torch.zeros(2, 1)}, r"rewards has shape \(2, 1\), response_mask has \(2, 3\)"),
    ],
)
def test_what_does_not_fit_is_named(mask: torch.Tensor, cu: torch.Tensor, data: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tokens(mask, cu, **data)


def test_one_entry_per_sequence() -> None:
    check_sequences(MASK, None, scores=torch.zeros(2))
    check_sequences(MASK[0], torch.tensor([0, 1, 3]), scores=torch.zeros(2))
    with pytest.raises(ValueError, match=r"scores has shape \(3,\), needs \(2,\)"):
        check_sequences(MASK, None, scores=torch.zeros(3))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 7), (5, 2**18 + 1), (2**10 + 3, 2**9), (2**19 + 5,)])
def test_row_blocks_cover_every_row_once(shape: tuple[int, ...]) -> None:
    rows = torch.arange(shape[0])
    blocks = [rows[block] for block in row_blocks(torch.empty(shape))]
    assert torch.equal(torch.cat(blocks), rows)
    assert all(len(block) <= 1 or len(block) * math.prod(shape[1:]) <= 2**18 for block in blocks)


@pytest.mark.parametrize("width", [3, 70_000])  # below and above the size from which numpy allocates
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64, torch.bfloat16])
def test_an_empty_tensor_is_torchs_own_whoever_allocated_it(width: int, dtype: torch.dtype) -> None:
    x = torch.zeros(2, width)
    for like in (x, x.t()):
        got = empty_like(like, dtype)
        assert (got.dtype, got.shape, got.stride(), got._base) == (dtype, like.shape, like.stride(), None)


@pytest.mark.parametrize("width", [3, 5000])
def test_a_count_is_an_integer_tensor(width: int) -> None:
    got = count(torch.arange(width) % 3 == 0)
    assert torch.equal(got, torch.tensor((width + 2) // 3))


@pytest.mark.parametrize("width", [3, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_may_be_written_in_place(width: int, dtype: torch.dtype) -> None:
    mask = torch.arange(width) % 3 == 0
    x = torch.where(mask, 1.5, torch.nan).to(dtype)
    write_zero_outside(mask, (x, x))
    assert torch.equal(x, 1.5 * mask.to(dtype))
