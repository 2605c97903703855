"""Returns that are discounted from turn to turn."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.advantage import discounted_returns

CLOSE = {"rtol": 0, "atol": 1e-12}


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def test_three_turns_with_tool_output_between() -> None:
    mask = torch.tensor([[True, True, False, True, False, False, True, True]])
    turns = torch.tensor([[0, 0, 0, 1, 7, 7, 2, 2]])
    got = discounted_returns(row(0, 1, 9, 0, 9, 9, 0, 8), mask, turn_ids=turns, gamma=0.5)
    torch.testing.assert_close(got, row(3, 3, 0, 4, 0, 0, 8, 8), **CLOSE)


def test_discounted_returns_take_what_follows_the_end_as_another_turn() -> None:
    mask, turns = torch.tensor([[True, True, False]]), torch.tensor([[4, 4, 4]])
    got = discounted_returns(row(0, 1, 9), mask, None, torch.tensor([6.0]), turns, gamma=0.5)
    torch.testing.assert_close(got, row(4, 4, 0), **CLOSE)


def test_a_turn_does_not_go_on_in_the_next_packed_sequence() -> None:
    mask, cu = torch.ones(4, dtype=torch.bool), torch.tensor([0, 2, 4])
    got = discounted_returns(row(0, 1, 0, 8)[0], mask, cu, torch.tensor([2.0, 0.0]), torch.zeros(4).long(), gamma=0.5)
    torch.testing.assert_close(got, row(2, 2, 8, 8)[0], **CLOSE)


@given(st.lists(st.booleans(), min_size=1, max_size=10), st.floats(0, 1), st.integers(0, 2**31))
def test_a_turn_per_token_is_no_turns(holes: list[bool], gamma: float, seed: int) -> None:
    mask = torch.tensor([holes])
    rewards = torch.randn(1, len(holes), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    got = discounted_returns(rewards, mask, turn_ids=torch.arange(len(holes))[None], gamma=gamma)
    torch.testing.assert_close(got, discounted_returns(rewards, mask, gamma=gamma), **CLOSE)


def test_one_turn_is_not_discounted() -> None:
    mask, rewards = torch.ones(1, 3, dtype=torch.bool), row(1, 2, 3)
    got = discounted_returns(rewards, mask, turn_ids=torch.zeros(1, 3).int(), gamma=0.5)
    torch.testing.assert_close(got, discounted_returns(rewards, mask, gamma=1.0), **CLOSE)


def test_turns_that_are_not_numbered_are_refused() -> None:
    with pytest.raises(ValueError, match="turn_ids has dtype"):
        discounted_returns(row(1), torch.ones(1, 1, dtype=torch.bool), turn_ids=torch.zeros(1, 1))
