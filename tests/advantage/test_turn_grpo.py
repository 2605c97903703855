"""Outcomes compared, and rewards of turns with those of the same turn."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlprims.advantage import grpo, turn_grpo
from rlprims.rewards import at_last_token
from rlprims.testing import check_advantage
from tests.records import BY_TOKEN, Record

RECORDS = [
    Record(
        "advantage.turn_grpo",
        check_advantage,
        matters={
            "turn_weight": 0.5,
            "gamma": 0.5,
            "normalize_std": False,
            "ddof": 0,
            "eps": 0.1,
            "tolerance": 10.0,
        },
        exempt=BY_TOKEN,
    ),
    Record(
        "advantage.turn_grpo",
        check_advantage,
        call={"normalize_std": False},
        exempt={**BY_TOKEN, "a scale passes or cancels": "rewards of turns are not scaled with the outcome"},
    ),
]

CLOSE = {"rtol": 0, "atol": 1e-12}
PLAIN = {"normalize_std": False}
ONE_GROUP = torch.tensor([0, 0])


def rows(*numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


class TestAToolCallAndAnAnswer:
    """Two samples of a tool call, a result and an answer; the reward is for the call, as in the authors' code."""

    mask = torch.tensor([[True, True, False, True], [True, False, True, True]])
    turns = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]])
    outcomes = rows([0, 0, 9, 1], [0, 9, 0, 0])
    calls = rows([0, 1, 9, 0], [0, 9, 0, 0])

    def test_up_to_the_result_both_count_and_after_it_the_outcome(self) -> None:
        got = turn_grpo(self.outcomes, self.calls, ONE_GROUP, self.turns, self.mask, eps=0.0)
        x = 0.5**0.5
        torch.testing.assert_close(got, rows([2 * x, 2 * x, 0, x], [-2 * x, 0, -x, -x]), **CLOSE)

    def test_the_coefficient_of_turns(self) -> None:
        got = turn_grpo(self.outcomes, self.calls, ONE_GROUP, self.turns, self.mask, turn_weight=0.5, **PLAIN)
        torch.testing.assert_close(got, rows([0.75, 0.75, 0, 0.5], [-0.75, 0, -0.5, -0.5]), **CLOSE)
        none = turn_grpo(self.outcomes, self.calls, ONE_GROUP, self.turns, self.mask, turn_weight=0.0)
        torch.testing.assert_close(none, grpo(self.outcomes, ONE_GROUP, self.mask, eps=1e-4), **CLOSE)

    def test_beside_the_authors_assignment(self) -> None:
        """Outcome z-score on all tokens, plus the turn's on those before the first result; TRL's std and eps."""
        outcome, call = rows([1, 0])[0], rows([1, 0])[0]

        def z(x: Tensor) -> Tensor:
            return (x - x.mean()) / (x.std() + 1e-4)

        before_result = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
        want = (z(outcome)[:, None] + z(call)[:, None] * before_result) * self.mask
        got = turn_grpo(self.outcomes, self.calls, ONE_GROUP, self.turns, self.mask)
        torch.testing.assert_close(got, want, **CLOSE)

    def test_a_reward_anywhere_in_a_turn_is_the_turns(self) -> None:
        moved = rows([1, 0, 9, 0], [0, 9, 0, 0])
        got = turn_grpo(self.outcomes, moved, ONE_GROUP, self.turns, self.mask)
        assert torch.equal(got, turn_grpo(self.outcomes, self.calls, ONE_GROUP, self.turns, self.mask))

    def test_turns_of_another_prompt_are_not_compared(self) -> None:
        got = turn_grpo(self.outcomes, self.calls, torch.tensor([0, 1]), self.turns, self.mask)
        assert not got.any()


def test_a_turn_that_one_sample_has_is_compared_with_none() -> None:
    mask, turns = torch.ones(2, 3, dtype=torch.bool), torch.tensor([[0, 1, 2], [0, 1, 1]])
    earned = rows([0, 0, 5], [0, 0, 0])
    assert not turn_grpo(torch.zeros_like(earned), earned, ONE_GROUP, turns, mask).any()


def test_turn_grpo_discounts_later_turns_by_turn_and_not_by_token() -> None:
    mask, turns = torch.ones(2, 5, dtype=torch.bool), torch.tensor([[0, 0, 0, 1, 2], [0, 1, 1, 2, 2]])
    earned = rows([0, 0, 0, 0, 8], [0, 0, 0, 0, 0])
    got = turn_grpo(torch.zeros_like(earned), earned, ONE_GROUP, turns, mask, gamma=0.5, **PLAIN)
    torch.testing.assert_close(got, rows([1, 1, 1, 2, 4], [-1, -2, -2, -4, -4]), **CLOSE)


def test_no_credit_flows_to_turns_after_the_reward() -> None:
    mask, turns = torch.ones(2, 3, dtype=torch.bool), torch.tensor([[0, 1, 2]] * 2)
    earned = rows([0, 4, 0], [0, 0, 0])
    got = turn_grpo(torch.zeros_like(earned), earned, ONE_GROUP, turns, mask, **PLAIN)
    torch.testing.assert_close(got, rows([2, 2, 0], [-2, -2, 0]), **CLOSE)


@given(st.integers(0, 2**31))
def test_turn_grpo_is_the_comparison_of_turns_one_by_one(seed: int) -> None:
    """In plain Python: each turn's sum against the mean of that turn's sums, and the sum of what follows."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 6, generator=generator) < 0.8
    turns = (torch.rand(mask.shape, generator=generator) < 0.5).cumsum(-1)
    outcomes = torch.randn(4, generator=generator, dtype=torch.float64)
    earned = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    ids = torch.tensor([0, 0, 0, 1])
    got = turn_grpo(at_last_token(outcomes, mask), earned, ids, turns, mask, gamma=0.5, **PLAIN)
    got = got - grpo(at_last_token(outcomes, mask), ids, mask, normalize_std=False)

    sums = {(i, int(k)): float(earned[i][mask[i] & (turns[i] == k)].sum()) for i in range(4) for k in turns[i][mask[i]]}

    def centred(i: int, k: int) -> float:
        there = [x for (j, other), x in sums.items() if other == k and ids[j] == ids[i]]
        return sums[i, k] - sum(there) / len(there)

    for i, k in sums:
        own = sorted(other for j, other in sums if j == i and other >= k)
        want = sum(0.5**steps * centred(i, later) for steps, later in enumerate(own))
        here = mask[i] & (turns[i] == k)
        assert got[i][here].tolist() == pytest.approx([want] * int(here.sum()), abs=1e-9)
    assert not got[~mask].any()
