"""A baseline for each token, weighted by energy."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.advantage import optimal_token_baseline
from rlprims.testing import check_advantage
from tests.records import BY_TOKEN, Record

RECORDS = [
    Record(
        "advantage.optimal_token_baseline",
        check_advantage,
        matters={"align": "columns", "singleton": "raw", "eps": 1.0},
        exempt=BY_TOKEN,
    ),
    Record("advantage.optimal_token_baseline", check_advantage, call={"align": "columns"}, exempt=BY_TOKEN),
]

CLOSE = {"rtol": 0, "atol": 1e-6}
IDS = torch.tensor([0, 0])
HALF = math.log(0.5)


def rows(*numbers: list[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def bools(*marks: str) -> torch.Tensor:
    return torch.tensor([[m == "1" for m in row] for row in marks])


class TestTwoResponses:
    """π = ½ everywhere, so that w = Σπ²; returns 3, 3 and 0. Numbers agree with verl 0.9.1, both forms."""

    rewards = rows([0, 3], [0, 0])
    log_probs = torch.full((2, 2), HALF, dtype=torch.float64)
    energy = rows([0.5, 0.5], [0.25, 0.25])
    mask = bools("11", "10")

    @pytest.mark.parametrize("align", ["tokens", "columns"])
    @pytest.mark.parametrize(("singleton", "tail"), [("zero", 0.0), ("raw", 3.0)])
    def test_the_first_tokens_are_compared(self, align: str, singleton: str, tail: float) -> None:
        # b = (0.5 · 3 + 0.25 · 0) / 0.75
        got = optimal_token_baseline(
            self.rewards, IDS, self.log_probs, self.energy, self.mask, align=align, singleton=singleton
        )
        torch.testing.assert_close(got, rows([1, tail], [-2, 0]), **CLOSE)

    def test_energy_gathers(self) -> None:
        # at the second token W is 1 and 0.5, and the returns are 3 and 0 as before
        got = optimal_token_baseline(self.rewards, IDS, self.log_probs, self.energy, bools("11", "11"))
        torch.testing.assert_close(got, rows([1, 1], [-2, -2]), **CLOSE)

    def test_importance_weights_are_squared(self) -> None:
        # b = (0.5 · 3) / (0.5 + 4 · 0.25)
        weights = rows([1, 1], [2, 2])
        got = optimal_token_baseline(
            self.rewards, IDS, self.log_probs, self.energy, self.mask, importance_weights=weights
        )
        torch.testing.assert_close(got, rows([2, 0], [-1, 0]), **CLOSE)

    def test_certain_tokens_have_no_energy(self) -> None:
        """π = 1 for the first response: it does not move the gradient, so the other's return is the baseline."""
        log_probs, energy = self.log_probs.clone(), self.energy.clone()
        log_probs[0], energy[0] = 0.0, 1.0
        got = optimal_token_baseline(self.rewards, IDS, log_probs, energy, self.mask)
        torch.testing.assert_close(got, rows([3, 0], [0, 0]), **CLOSE)

    def test_if_all_are_certain_the_baseline_is_the_mean(self) -> None:
        nothing = torch.zeros(2, 2)
        got = optimal_token_baseline(self.rewards.float(), IDS, nothing, torch.ones(2, 2) + 1e-7, self.mask)
        torch.testing.assert_close(got, rows([1.5, 0], [-1.5, 0]).float(), **CLOSE)

    def test_all_but_certain_tokens_keep_their_energy_in_float32(self) -> None:
        """1 − 2π + Σπ² is (1 − π)² and the squares of the others; in float32 it would be the rounding of 1 − 1."""
        less = rows([1e-3, 1e-3], [2e-3, 2e-3])
        log_probs, energy = torch.log1p(-less), (1 - less).square() + less.square() / 100
        got = optimal_token_baseline(self.rewards.float(), IDS, log_probs.float(), energy.float(), bools("11", "11"))
        want = 3 * 0.8  # the second response has four times the energy of the first
        torch.testing.assert_close(got, rows([want, want], [want - 3, want - 3]).float(), rtol=0, atol=0.01)


def test_float32_says_what_float64_says() -> None:
    """By the definition, token by token, at squares that a distribution can have: from π² to π² + (1 − π)²."""
    generator = torch.Generator().manual_seed(0)
    ids, shape = torch.arange(96) % 12, (96, 50)
    pi, more = torch.rand(2, *shape, generator=generator, dtype=torch.float64).clamp(min=1e-6)
    rewards, energy = torch.rand(shape, generator=generator).double(), pi.square() + more * (1 - pi).square()
    mask = torch.arange(50) < torch.randint(1, 51, (96, 1), generator=generator)
    returns = torch.where(mask, rewards, 0.0).flip(1).cumsum(1).flip(1)
    weights = torch.where(mask, torch.where(mask, 1 - 2 * pi + energy, 0.0).cumsum(1) + 1e-8, 0.0)
    want = torch.zeros(shape, dtype=torch.float64)
    for group in range(12):
        of = ids == group
        baseline = (weights[of] * returns[of]).sum(0) / weights[of].sum(0).clamp(min=1e-30)
        baseline[mask[of].sum(0) < 2] = 0.0
        want[of] = torch.where(mask[of], returns[of] - baseline, 0.0)
    data = (pi.log(), energy, mask)
    for align in ("tokens", "columns"):
        got = optimal_token_baseline(rewards, ids, *data, align=align, singleton="raw")
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
        single = optimal_token_baseline(
            rewards.float(), ids, data[0].float(), data[1].float(), mask, align=align, singleton="raw"
        )
        torch.testing.assert_close(single.double(), want, rtol=0, atol=1e-6 * want.abs().max().item())


def test_energies_of_no_distribution_are_taken_as_they_are() -> None:
    """Σπ² < π² cannot be; the mean is still the weighted one, as in verl 0.9.1, also with negative weights."""
    rewards, log_probs = rows([3], [0]), torch.zeros(2, 1, dtype=torch.float64)
    got = optimal_token_baseline(rewards, IDS, log_probs, rows([0.0], [0.5]), bools("1", "1"))
    torch.testing.assert_close(got, rows([1], [-2]), **CLOSE)  # weights −1 and −1/2: b = 2


def test_a_tool_call_shifts_columns_and_not_tokens() -> None:
    """verl 0.9.1: tir_optimal_token_baseline and optimal_token_baseline."""
    rewards, mask = rows([0, 0, 2], [0, 0, 0]), bools("101", "110")
    log_probs, energy = torch.full((2, 3), HALF, dtype=torch.float64), torch.full((2, 3), 0.5, dtype=torch.float64)
    tokens = optimal_token_baseline(rewards, IDS, log_probs, energy, mask)
    torch.testing.assert_close(tokens, rows([1, 0, 1], [-1, -1, 0]), **CLOSE)
    columns = optimal_token_baseline(rewards, IDS, log_probs, energy, mask, align="columns")
    torch.testing.assert_close(columns, rows([1, 0, 0], [-1, 0, 0]), **CLOSE)


def test_a_group_of_one() -> None:
    """verl 0.9.1 keeps the return."""
    one, log_probs = rows([1, 2]), torch.full((1, 2), HALF, dtype=torch.float64)
    group = torch.zeros(1, dtype=torch.int64)
    assert optimal_token_baseline(one, group, log_probs, one, bools("11")).tolist() == [[0, 0]]
    assert optimal_token_baseline(one, group, log_probs, one, bools("11"), singleton="raw").tolist() == [[3, 2]]


@given(st.lists(st.text("01", min_size=5, max_size=5), min_size=2, max_size=5), st.integers(0, 2**31))
def test_optimal_token_baseline_equals_that_of_responses_without_their_gaps(patterns: list[str], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = bools(*patterns)
    ids = torch.zeros(len(mask), dtype=torch.int64)
    rewards, energy, log_probs = torch.rand(3, *mask.shape, generator=generator, dtype=torch.float64)
    got = optimal_token_baseline(rewards, ids, -log_probs, energy + 1, mask, singleton="raw")
    left = (~mask).long().argsort(dim=-1, stable=True)
    compact = [x.gather(-1, left) for x in (rewards, -log_probs, energy + 1, mask)]
    want = optimal_token_baseline(compact[0], ids, compact[1], compact[2], compact[3], singleton="raw", align="columns")
    torch.testing.assert_close(got.gather(-1, left), want, rtol=0, atol=1e-12)
