"""Group-relative advantages."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.advantage import grpo
from rlprims.testing import check_advantage
from tests.records import STATISTICS_OF_THE_BATCH, Record, doubled

ONLY_OF_THE_KEPT = "a response that is not kept has advantage 0"

RECORDS = [
    Record(
        "advantage.grpo",
        check_advantage,
        matters={"normalize_std": False, "ddof": 0, "eps": 0.1, "singleton": "raw", "tolerance": 10.0},
    ),
    Record("advantage.grpo", check_advantage, call={"normalize_std": False}),
    Record("advantage.grpo", check_advantage, call={"ddof": 0, "eps": 1e-4}),
    Record("advantage.grpo", check_advantage, matters={"baseline": "leave_one_out", "std_over": "batch"}),
    Record("advantage.grpo", check_advantage, call={"baseline": "leave_one_out"}),
    Record(
        "advantage.grpo",
        check_advantage,
        call={"std_over": "batch"},
        matters={"all_reduce": doubled},
        exempt={
            **STATISTICS_OF_THE_BATCH,
            "a shift of a group cancels": "the deviation of raw rewards grows with the distance between prompts",
        },
    ),
    Record("advantage.grpo", check_advantage, call={"std_over": "batch_centred"}, exempt=STATISTICS_OF_THE_BATCH),
    Record(
        "advantage.grpo",
        check_advantage,
        call={"keep": 2},
        matters={"keep": 3, "keep_by": "reward_per_token"},
        exempt={"a higher score never gets a lower advantage": ONLY_OF_THE_KEPT},
    ),
    Record(
        "advantage.grpo",
        check_advantage,
        call={"keep": 2, "keep_by": "reward_per_token"},
        exempt={
            "a higher score never gets a lower advantage": ONLY_OF_THE_KEPT,
            "a shift of a group cancels": "a quotient of the score and the length decides which responses are kept",
        },
    ),
]

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def scored(*scores: float, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per response."""
    return torch.tensor(scores, dtype=dtype)[:, None], torch.ones(len(scores), 1, dtype=torch.bool)


def group(*sizes: int) -> torch.Tensor:
    return torch.tensor([i for i, size in enumerate(sizes) for _ in range(size)])


def test_grpo_of_one_right_of_four() -> None:
    rewards, mask = scored(1, 0, 0, 0)
    got = grpo(rewards, group(4), mask, eps=0.0)[:, 0]
    torch.testing.assert_close(got, torch.tensor([1.5, -0.5, -0.5, -0.5], dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_population_deviation() -> None:
    rewards, mask = scored(1, 0, 0, 0)
    got = grpo(rewards, group(4), mask, ddof=0, eps=0.0)[0, 0]
    assert got == pytest.approx(0.75 / math.sqrt(3 / 16))


def test_eps_is_added_to_the_deviation() -> None:
    rewards, mask = scored(1, 0, 0, 0)
    assert grpo(rewards, group(4), mask, eps=0.5)[0, 0] == pytest.approx(0.75)


def test_dr_grpo_only_centres() -> None:
    rewards, mask = scored(1, 0, 0, 0, 5, 3)
    got = grpo(rewards, group(4, 2), mask, normalize_std=False)[:, 0]
    assert got.tolist() == [0.75, -0.25, -0.25, -0.25, 1, -1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize(("score", "size"), [(0.1, 9), (1000.1, 3), (1000.1, 7), (0.1, 2), (-1e6, 8)])
def test_equal_rewards_give_zero(score: float, size: int, normalize_std: bool, dtype: torch.dtype) -> None:
    rewards, mask = scored(*[score] * size, dtype=dtype)
    assert (grpo(rewards, group(size), mask, normalize_std=normalize_std, eps=1e-9) == 0).all()


def test_a_sum_of_equal_parts_in_another_order_gives_zero() -> None:
    rewards = torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]], dtype=torch.float64)
    assert rewards[0].cumsum(0)[-1] != rewards[1].cumsum(0)[-1]
    assert (grpo(rewards, group(2), torch.ones(2, 3, dtype=torch.bool)) == 0).all()


def test_a_constant_group_beside_a_varied_one() -> None:
    rewards, mask = scored(0.1, 0.1, 0.1, 1.0, 0.0)
    got = grpo(rewards, group(3, 2), mask)[:, 0]
    assert (got[:3] == 0).all()
    assert got[3] == -got[4] != 0


def test_a_large_offset_does_not_eat_the_deviation() -> None:
    low, mask = scored(1, 2, 4, dtype=torch.float32)
    got, want = grpo(low + 1e5, group(3), mask), grpo(low, group(3), mask)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


def test_the_gradient_of_equal_rewards_is_zero_and_not_nan() -> None:
    rewards, mask = scored(1, 1, 2, 4, 7)
    rewards.requires_grad_()
    grpo(rewards, group(2, 2, 1), mask, eps=1.0)[::2].sum().backward()
    assert rewards.grad is not None
    assert rewards.grad[[0, 1, 4]].tolist() == [[0], [0], [0]]
    slope = 0.5 / (2**0.5 + 1) ** 2  # of (a − b)/2 / (|a − b|/√2 + 1) in a, where b − a = 2
    torch.testing.assert_close(rewards.grad[2:4, 0], torch.tensor([slope, -slope], dtype=torch.float64))


class TestGroupOfOne:
    rewards, mask = scored(3.0, 1.0, 0.0)
    ids = torch.tensor([1, 0, 0])

    def test_is_zero_by_default(self) -> None:
        assert grpo(self.rewards, self.ids, self.mask)[0, 0] == 0

    def test_may_keep_its_reward(self) -> None:
        got = grpo(self.rewards, self.ids, self.mask, singleton="raw")
        assert got[0, 0] == 3
        assert got[1, 0] == -got[2, 0] > 0

    def test_may_be_an_error(self) -> None:
        with pytest.raises(ValueError, match="one valid row"):
            grpo(self.rewards, self.ids, self.mask, singleton="error")
        grpo(self.rewards[1:], self.ids[1:], self.mask[1:], singleton="error")


def test_rows_may_be_left_out_of_the_statistics() -> None:
    rewards, mask = scored(1, 0, 100)
    valid = torch.tensor([True, True, False])
    got = grpo(rewards, group(3), mask, valid_rows=valid, normalize_std=False)[:, 0]
    assert got.tolist() == [0.5, -0.5, 0]


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16))
def test_grpo_exceeds_no_bound_of_standard_scores(scores: list[float]) -> None:
    n = len(scores)
    rewards, mask = scored(*scores)
    got = grpo(rewards, group(n), mask)
    assert got.abs().max() <= (n - 1) / math.sqrt(n) * (1 + 1e-9)
    assert got.sum().abs() <= 1e-9 * n


@given(st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, 1000.1]), min_size=2, max_size=12), st.sampled_from(DTYPES))
def test_the_sign_is_that_of_the_distance_to_the_mean(scores: list[float], dtype: torch.dtype) -> None:
    rewards, mask = scored(*scores, dtype=dtype)
    got = grpo(rewards, group(len(scores)), mask)[:, 0]
    exact = [float(s) for s in rewards[:, 0]]
    mean = math.fsum(exact) / len(exact)
    for advantage, score in zip(got.tolist(), exact, strict=True):
        if abs(score - mean) > 1e-3:
            assert advantage * (score - mean) > 0


def test_gfpo_keeps_the_shortest_or_the_most_efficient() -> None:
    scores, lengths = [1.0, 0.0, 1.0, 0.5], [8, 2, 4, 1]
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    rewards = torch.tensor(scores, dtype=torch.float64)[:, None] * (torch.arange(8) == 0)
    got = grpo(rewards, torch.zeros(4, dtype=torch.int64), mask, normalize_std=False, keep=3)[:, 0]
    assert got.tolist() == [0.0, -0.5, 0.5, 0.0]  # of 0, 1 and 0.5
    # per token 0.125, 0, 0.25 and 0.5: the last two
    got = grpo(
        rewards, torch.zeros(4, dtype=torch.int64), mask, normalize_std=False, keep=2, keep_by="reward_per_token"
    )
    assert got[:, 0].tolist() == [0.0, 0.0, 0.25, -0.25]


def test_gfpo_is_grpo_of_the_rows_that_are_kept() -> None:
    """With every other option; groups of at most k, and rows that are not valid, are as they are."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(3).repeat_interleave(torch.tensor([6, 2, 4]))
    mask = torch.arange(9) < torch.randperm(12, generator=generator)[:, None] % 9 + 1
    rewards = torch.randn(12, 9, generator=generator, dtype=torch.float64) * mask
    valid = torch.arange(12) != 3
    order = sorted(range(12), key=lambda row: int(mask[row].sum()))
    chosen = [row for group in range(3) for row in [r for r in order if ids[r] == group and valid[r]][:3]]
    rows = torch.tensor([row in chosen for row in range(12)])
    for options in ({}, {"baseline": "leave_one_out"}, {"std_over": "batch"}, {"singleton": "raw", "ddof": 0}):
        got = grpo(rewards, ids, mask, valid_rows=valid, keep=3, **options)
        torch.testing.assert_close(got, grpo(rewards, ids, mask, valid_rows=rows, **options))


def test_gfpo_does_not_keep_a_response_without_a_token() -> None:
    rewards = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    mask = torch.tensor([[False, False], [True, False], [True, True]])
    got = grpo(rewards, torch.zeros(3, dtype=torch.int64), mask, normalize_std=False, keep=2)
    assert got[:, 0].tolist() == [0.0, 0.5, -0.5]


def test_one_response_is_not_a_group() -> None:
    rewards, mask = scored(1, 0)
    with pytest.raises(ValueError, match="keep=1"):
        grpo(rewards, group(2), mask, keep=1)
    with pytest.raises(ValueError, match="keep_by"):
        grpo(rewards, group(2), mask, keep_by="score")
