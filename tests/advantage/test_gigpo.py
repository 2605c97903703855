"""Episodes compared, and steps from the same state."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.advantage import discounted_returns, gigpo, grpo
from rlprims.testing import check_advantage
from tests.records import BY_TOKEN, Record

RECORDS = [
    Record(
        "advantage.gigpo",
        check_advantage,
        matters={
            "omega": 0.5,
            "gamma": 0.5,
            "normalize_std": False,
            "ddof": 0,
            "eps": 0.1,
            "tolerance": 10.0,
        },
        exempt={
            **BY_TOKEN,
            "equal rewards give zero": "steps that end sooner have a higher return",
            "a shift of a group cancels": "steps that end sooner have more of it",
        },
    ),
    Record("advantage.gigpo", check_advantage, call={"gamma": 1.0, "normalize_std": False}, exempt=BY_TOKEN),
]

CLOSE = {"rtol": 0, "atol": 1e-12}
PLAIN = {"normalize_std": False, "gamma": 0.5}


def rows(*numbers: list[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


class TestTwoEpisodes:
    """Turns of 1, 1, 2 tokens and of 2, 2; rewards at the ends of turns. Both begin in state 5 and both pass 7."""

    rewards = rows([0, 1, 0, 4], [0, 2, 0, 0])
    turns = torch.tensor([[0, 1, 2, 2], [0, 0, 1, 1]])
    states = torch.tensor([[5, 6, 7, 7], [5, 5, 7, 7]])
    ids = torch.tensor([0, 0])
    mask = torch.ones(2, 4, dtype=torch.bool)

    def test_by_hand(self) -> None:
        # episodes: 5 and 2. Returns by turn: 0 + ½ (1 + ½ 4) = 1.5, 1 + ½ 4 = 3 and 4; 2 + 0 = 2 and 0.
        # in state 5: 1.5 and 2; in 6: 3, alone; in 7: 4 and 0.
        got = gigpo(self.rewards, self.ids, self.turns, self.states, self.mask, **PLAIN)
        torch.testing.assert_close(got, rows([1.25, 1.5, 3.5, 3.5], [-1.25, -1.25, -3.5, -3.5]), **CLOSE)

    def test_in_deviations(self) -> None:
        x = 0.5**0.5
        got = gigpo(self.rewards, self.ids, self.turns, self.states, self.mask, gamma=0.5, eps=0.0)
        torch.testing.assert_close(got, rows([0, x, 2 * x, 2 * x], [0, 0, -2 * x, -2 * x]), **CLOSE)

    def test_the_weight_of_steps(self) -> None:
        none = gigpo(self.rewards, self.ids, self.turns, self.states, self.mask, omega=0.0)
        torch.testing.assert_close(none, grpo(self.rewards, self.ids, self.mask), **CLOSE)
        half = gigpo(self.rewards, self.ids, self.turns, self.states, self.mask, omega=0.5, **PLAIN)
        torch.testing.assert_close(half[0], rows([1.375, 1.5, 2.5, 2.5])[0], **CLOSE)

    def test_a_reward_anywhere_in_a_turn_is_the_turns(self) -> None:
        moved = rows([0, 1, 4, 0], [2, 0, 0, 0])
        got = gigpo(moved, self.ids, self.turns, self.states, self.mask)
        torch.testing.assert_close(
            got, gigpo(self.rewards, self.ids, self.turns, self.states, self.mask), rtol=0, atol=1e-12
        )

    def test_a_state_of_another_prompt_is_another_state(self) -> None:
        got = gigpo(self.rewards, torch.tensor([0, 1]), self.turns, self.states, self.mask)
        assert (got == 0).all()

    def test_a_state_may_have_any_number(self) -> None:
        names = {5: -(2**62), 6: 0, 7: 2**62}
        renamed = self.states.clone().apply_(names.__getitem__)
        got = gigpo(self.rewards, self.ids, self.turns, renamed, self.mask, **PLAIN)
        torch.testing.assert_close(
            got, gigpo(self.rewards, self.ids, self.turns, self.states, self.mask, **PLAIN), **CLOSE
        )

    def test_a_state_seen_twice_in_one_episode_is_compared_with_itself(self) -> None:
        # returns 1.5 and 3 in state 5 of the first episode: ∓0.75
        states = torch.tensor([[5, 5, 7, 7], [8, 8, 9, 9]])
        got = gigpo(self.rewards, self.ids, self.turns, states, self.mask, **PLAIN)
        torch.testing.assert_close(got[0], rows([0.75, 2.25, 1.5, 1.5])[0], **CLOSE)


def test_if_no_two_steps_share_a_state_it_is_grpo() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) < 0.8
    turns = torch.arange(5).expand(4, 5)
    ids = torch.tensor([0, 0, 1, 1])
    got = gigpo(rewards, ids, turns, torch.arange(20).reshape(4, 5), mask)
    torch.testing.assert_close(got, grpo(rewards, ids, mask), **CLOSE)


@given(st.lists(st.text("01", min_size=6, max_size=6), min_size=2, max_size=4), st.integers(0, 2**31))
def test_gigpo_is_the_comparison_of_steps_one_by_one(patterns: list[str], seed: int) -> None:
    """Turn by turn in plain Python: what each step earns, who else was there, and the mean of theirs."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[m == "1" for m in row] for row in patterns])
    rewards = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    turns = (torch.rand(mask.shape, generator=generator) < 0.5).cumsum(-1)
    of_turn = torch.randint(3, (len(mask), 7), generator=generator)
    states = of_turn.gather(1, turns)
    ids = torch.randint(2, (len(mask),), generator=generator)
    got = gigpo(rewards, ids, turns, states, mask, omega=1.0, **PLAIN) - grpo(rewards, ids, mask, normalize_std=False)

    steps: dict[tuple[int, int], tuple[tuple[int, int], float]] = {}
    for i in range(len(mask)):
        worth = 0.0
        for turn in sorted({int(t) for t in turns[i][mask[i]]}, reverse=True):
            here = mask[i] & (turns[i] == turn)
            worth = float(rewards[i][here].sum()) + 0.5 * worth
            steps[i, turn] = (int(ids[i]), int(of_turn[i, turn])), worth
    for (i, turn), (place, worth) in steps.items():
        there = [w for p, w in steps.values() if p == place]
        want = worth - sum(there) / len(there)
        assert got[i][mask[i] & (turns[i] == turn)].tolist() == pytest.approx(
            [want] * int((mask[i] & (turns[i] == turn)).sum()), abs=1e-9
        )
    assert (got[~mask] == 0).all()


def test_states_that_are_not_numbered_are_refused() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="state_ids has dtype"):
        gigpo(one, torch.tensor([0]), one.long(), one, one.bool())


def test_a_step_has_one_return_if_its_reward_is_on_its_last_token() -> None:
    """ROLL's step_reinforce is the return by turn alone: no group."""
    turns = torch.tensor([[0, 0, 1, 2, 2]])
    got = discounted_returns(rows([0, 1, 0, 0, 8]), torch.ones(1, 5, dtype=torch.bool), turn_ids=turns, gamma=0.5)
    torch.testing.assert_close(got, rows([3, 3, 4, 8, 8]), **CLOSE)
