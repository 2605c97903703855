"""Padded and packed sequences, and turns, against plain loops."""

from itertools import zip_longest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from rlprims import layout
from rlprims.layout import (
    expand_to_tokens,
    last_of_turn,
    last_token,
    lengths_of_tokens,
    next_valid,
    pack,
    sequence_ids,
    sequence_lengths,
    sequence_sum,
    to_tokens,
    turn_boundaries,
    unpack,
)

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=7)
ROWS = st.lists(st.lists(st.tuples(st.integers(-1, 2), st.booleans()), min_size=5, max_size=5), min_size=1, max_size=4)


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
        layout.check_cu_seqlens(torch.tensor(cu), 4)


def test_boundaries_that_fit() -> None:
    for cu in ([0, 4], [0, 0, 4, 4], [0, 1, 2, 3, 4]):
        layout.check_cu_seqlens(torch.tensor(cu), 4)
    layout.check_cu_seqlens(torch.tensor([0]), 0)


@given(st.lists(st.booleans(), max_size=12))
def test_the_next_valid_position(marks: list[bool]) -> None:
    mask = torch.tensor([marks], dtype=torch.bool)
    want = [next((u for u in range(t + 1, len(marks)) if marks[u]), len(marks) - 1) for t in range(len(marks))]
    got = next_valid(mask)[0]
    assert got.dtype is torch.int64
    assert got.tolist() == want


def ends_of(turns: list[int], valid: list[bool]) -> list[bool]:
    positions = [t for t, v in enumerate(valid) if v]
    ends = {t for t, u in zip_longest(positions, positions[1:]) if u is None or turns[t] != turns[u]}
    return [t in ends for t in range(len(turns))]


@given(ROWS)
def test_a_turn_ends_before_a_valid_token_of_another(rows: list[list[tuple[int, bool]]]) -> None:
    turns, mask = (torch.tensor([[cell[i] for cell in row] for row in rows]) for i in (0, 1))
    want = [ends_of(*(list(column) for column in zip(*row, strict=True))) for row in rows]
    assert last_of_turn(turns, mask).tolist() == want
    cu = torch.arange(len(rows) + 1) * 5
    assert last_of_turn(turns.flatten(), mask.flatten(), cu).tolist() == [end for row in want for end in row]


@given(ROWS)
def test_the_valid_tokens_of_a_turn_and_no_others_share_a_sequence(rows: list[list[tuple[int, bool]]]) -> None:
    turns, mask = (torch.tensor([[cell[i] for cell in row] for row in rows]) for i in (0, 1))
    boundaries = turn_boundaries(turns, mask)
    tokens = mask.numel()
    assert boundaries.shape == (tokens + 1,)
    assert boundaries[0] == 0
    assert boundaries[-1] == tokens
    assert (boundaries.diff() >= 0).all()
    valid = mask.flatten()
    ends = last_of_turn(turns, mask).flatten()[valid].long()
    number = ends.cumsum(0) - ends  # of each valid token's turn, from 0
    sequence = sequence_ids(boundaries, tokens)[valid]
    assert torch.equal(sequence[:, None] == sequence, number[:, None] == number)


def test_turns_without_a_number_are_refused() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(ValueError, match=r"turn_ids has dtype .*, expected integers"):
            last_of_turn(torch.zeros(1, 2, dtype=dtype), mask)


@given(lengths=st.lists(st.integers(0, 5), max_size=6))
def test_boundaries_of_lengths(lengths: list[int]) -> None:
    """Of a list and of a tensor; each sequence has its length."""
    made = layout.cu_seqlens(lengths)
    assert made.dtype is torch.int64
    assert made.diff().tolist() == lengths
    assert made[0] == 0
    layout.check_cu_seqlens(made, sum(lengths))
    assert torch.equal(layout.cu_seqlens(torch.tensor(lengths, dtype=torch.int32)), made)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1.5, 2.0], "dtype torch.float32, expected integers"),
        ([[1, 2]], r"shape \(1, 2\)"),
        ([True], "dtype torch.bool"),
        ([2, -1], "lengths has -1"),
    ],
)
def test_lengths_that_are_none(lengths: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout.cu_seqlens(lengths)


def test_boundaries_in_a_compiled_step_and_on_a_device_without_a_look() -> None:
    with FakeTensorMode():
        assert layout.cu_seqlens(torch.empty(3, dtype=torch.int64)).shape == (4,)
    compiled = torch.compile(layout.cu_seqlens, fullgraph=True, backend="eager")
    assert compiled(torch.tensor([2, 1])).tolist() == [0, 2, 3]
