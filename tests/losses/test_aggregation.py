"""From per-token losses to the scalar of a step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.losses import (
    count_totals,
    prompt_token_mean,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
    token_sum,
)
from rlprims.testing import check_aggregation
from rlprims.types import Totals
from tests.records import Record

RECORDS = [
    Record("losses.prompt_token_mean", check_aggregation),
    Record("losses.seq_mean_token_mean", check_aggregation),
    Record("losses.seq_mean_token_sum", check_aggregation),
    Record("losses.seq_mean_token_sum_norm", check_aggregation, call={"length": 16}, matters={"length": 8}),
    Record("losses.token_mean", check_aggregation),
    Record("losses.token_sum", check_aggregation),
    Record("losses.trajectory_mean", check_aggregation),
]

LENGTHS = torch.tensor([2, 8, 10, 4])
MASK = torch.arange(10) < LENGTHS[:, None]
LOSSES = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)[:, None].expand(4, 10)


def test_four_sequences_of_constant_loss() -> None:
    assert token_sum(LOSSES, MASK) == 64
    assert token_mean(LOSSES, MASK) == pytest.approx(64 / 24)
    assert seq_mean_token_mean(LOSSES, MASK) == 2.5
    assert seq_mean_token_sum(LOSSES, MASK) == 16
    assert seq_mean_token_sum_norm(LOSSES, MASK, length=10) == pytest.approx(1.6)


def test_the_mean_per_prompt() -> None:
    # prompt 0: (2 + 30) / 12, prompt 1: (16 + 16) / 12
    assert prompt_token_mean(LOSSES, torch.tensor([0, 1, 0, 1]), MASK) == pytest.approx((32 / 12 + 32 / 12) / 2)
    # prompt 0: (2 + 16 + 30) / 20, prompt 1: 16 / 4
    assert prompt_token_mean(LOSSES, torch.tensor([0, 0, 0, 1]), MASK) == pytest.approx((2.4 + 4) / 2)


def test_the_two_token_means_of_dapo_differ() -> None:
    ids = torch.tensor([0, 0, 0, 1])
    assert prompt_token_mean(LOSSES, ids, MASK) != token_mean(LOSSES, MASK)
    assert prompt_token_mean(LOSSES, torch.zeros_like(ids), MASK) == pytest.approx(token_mean(LOSSES, MASK).item())


def test_local_denominators_would_give_another_number() -> None:
    halves = [(LOSSES[:2], MASK[:2]), (LOSSES[2:], MASK[2:])]
    assert torch.stack([token_mean(x, m) for x, m in halves]).mean() == pytest.approx(2.5429, abs=5e-5)
    totals = count_totals(MASK)
    assert sum(token_mean(x, m, totals=totals) for x, m in halves) == pytest.approx(64 / 24)


def test_equal_lengths_make_the_modes_coincide() -> None:
    losses = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.ones(4, 6, dtype=torch.bool)
    want = losses.mean().item()
    assert token_mean(losses, mask) == pytest.approx(want)
    assert seq_mean_token_mean(losses, mask) == pytest.approx(want)
    assert seq_mean_token_sum_norm(losses, mask, length=6) == pytest.approx(want)
    assert prompt_token_mean(losses, torch.tensor([0, 0, 1, 1]), mask) == pytest.approx(want)


def test_a_constant_length_does_not_see_the_padding() -> None:
    wide = torch.nn.functional.pad(LOSSES, (0, 5)), torch.nn.functional.pad(MASK, (0, 5))
    assert seq_mean_token_sum_norm(*wide, length=10) == pytest.approx(1.6)


def test_counts() -> None:
    mask = torch.tensor([[True, True], [False, False], [True, False], [False, False]])
    counts = count_totals(mask, group_ids=torch.tensor([0, 0, 1, 2]))
    assert [int(n) for n in counts[:3]] == [3, 2, 2]
    assert [int(n) for n in count_totals(mask)[:3]] == [3, 2, 0]
    assert count_totals(mask).trajectories is None
    assert int(count_totals(mask, trajectory_ids=torch.tensor([0, 1, 0, 3])).trajectories) == 1
    assert int(count_totals(mask, trajectory_ids=torch.tensor([0, 0, 1, 1])).trajectories) == 2
    packed = count_totals(mask.flatten(), torch.tensor([0, 2, 4, 6, 8]), torch.tensor([0, 0, 1, 2]))
    assert [int(n) for n in packed[:3]] == [3, 2, 2]


def test_a_mean_of_20_000_packed_tokens_has_no_drift() -> None:
    """Added up one by one in float32, 20,000 times 0.1 gave a mean of 0.09998; padded it was 0.1."""
    losses = torch.full((3, 20_000), 0.1)
    mask = torch.ones(3, 20_000, dtype=torch.bool)
    packed = (losses.flatten(), mask.flatten(), torch.arange(4) * 20_000)
    ids = torch.tensor([0, 0, 1])
    assert seq_mean_token_mean(losses, mask).item() == pytest.approx(0.1, abs=1e-6)
    assert seq_mean_token_mean(*packed).item() == pytest.approx(0.1, abs=1e-6)
    assert prompt_token_mean(packed[0], ids, *packed[1:]).item() == pytest.approx(0.1, abs=1e-6)
    assert token_mean(*packed).item() == pytest.approx(0.1, abs=1e-6)


def test_counts_of_nothing() -> None:
    assert [int(n) for n in count_totals(torch.zeros(0, 5, dtype=torch.bool))[:3]] == [0, 0, 0]


def test_whole_groups_need_no_group_tokens() -> None:
    ids = torch.tensor([0, 0, 1, 1])
    totals = count_totals(MASK, group_ids=ids)
    parts = [
        prompt_token_mean(LOSSES[rows], torch.zeros(2, dtype=torch.int64), MASK[rows], totals=totals)
        for rows in (slice(0, 2), slice(2, 4))
    ]
    torch.testing.assert_close(parts[0] + parts[1], prompt_token_mean(LOSSES, ids, MASK), rtol=0, atol=1e-12)


def test_totals_may_be_numbers_or_tensors() -> None:
    numbers = Totals(tokens=48, sequences=8, groups=4, trajectories=2)
    tensors = Totals(*(torch.tensor(n) for n in numbers))
    for totals in (numbers, tensors):
        assert token_mean(LOSSES, MASK, totals=totals) == pytest.approx(64 / 48)
        assert seq_mean_token_mean(LOSSES, MASK, totals=totals) == pytest.approx(10 / 8)
        assert seq_mean_token_sum(LOSSES, MASK, totals=totals) == pytest.approx(64 / 8)


@pytest.mark.parametrize("aggregate", [token_mean, seq_mean_token_mean, seq_mean_token_sum])
@pytest.mark.parametrize("count", [24, (24, 4, 1, 1), torch.tensor(24)])
def test_a_count_without_its_name_is_no_total(aggregate, count) -> None:
    with pytest.raises(ValueError, match=r"expected types\.Totals, .* use losses\.count_totals"):
        aggregate(LOSSES, MASK, totals=count)


def test_totals_of_nothing_and_of_one() -> None:
    nothing, one = Totals(tokens=0, sequences=0, groups=0), Totals(tokens=1, sequences=1, groups=1)
    none = torch.zeros_like(MASK)
    assert token_mean(LOSSES, none, totals=nothing) == 0
    assert seq_mean_token_mean(LOSSES, none, totals=nothing) == 0
    assert token_mean(LOSSES, MASK, totals=one) == pytest.approx(64)
    assert seq_mean_token_mean(LOSSES, MASK, totals=one) == pytest.approx(10)


def test_any_length_above_zero_will_do() -> None:
    assert seq_mean_token_sum_norm(LOSSES, MASK, length=0.5) == pytest.approx(32.0)


def test_a_length_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="length"):
        seq_mean_token_sum_norm(LOSSES, MASK, length=0)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(0, 2**31))
def test_any_split_gives_the_step(part_of_row: list[int], seed: int) -> None:
    """Also where a part, a row, or everything is empty."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(part_of_row)
    losses = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, 5, generator=generator) < 0.4
    totals = count_totals(mask)
    for aggregate in (token_mean, seq_mean_token_mean, seq_mean_token_sum):
        parts = [torch.tensor([p == part for p in part_of_row]) for part in range(4)]
        total = sum(aggregate(losses[part], mask[part], totals=totals) for part in parts)
        torch.testing.assert_close(total, aggregate(losses, mask), rtol=0, atol=1e-12)
