"""Q(s, a) − V(s) from the visits of a group."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlprims.advantage import gigpo, grpo, rtmc
from rlprims.rewards import at_last_token
from rlprims.testing import check_advantage
from tests.records import BY_TOKEN, Record

RECORDS = [
    Record(
        "advantage.rtmc",
        check_advantage,
        matters={"gamma": 0.5, "prior": 0.0},
        exempt={
            **BY_TOKEN,
            "equal rewards give zero": "steps that end sooner have a higher return",
            "a shift of a group cancels": "steps that end sooner have more of it",
        },
    ),
    Record("advantage.rtmc", check_advantage, call={"gamma": 1.0, "prior": 1.0}, exempt=BY_TOKEN),
]

CLOSE = {"rtol": 0, "atol": 1e-12}
PLAIN = {"gamma": 1.0, "prior": 0.0}


def rows(*numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


class TestThreeEpisodes:
    """All begin in state 5; two take action 1 and meet in state 6, the third takes action 2. Scores 1, 0 and 1."""

    mask = torch.tensor([[True, True, True], [True, True, False], [True, False, True]])
    turns = torch.tensor([[0, 0, 1], [0, 1, 1], [0, 0, 1]])
    states = torch.tensor([[5, 5, 6], [5, 6, 6], [5, 5, 7]])
    actions = torch.tensor([[1, 1, 3], [1, 4, 4], [2, 2, 3]])
    rewards = rows([0, 0, 1], [0, 0, 9], [0, 9, 1])
    ids = torch.zeros(3, dtype=torch.int64)

    def advantages(self, **hyperparameters: float) -> Tensor:
        return rtmc(self.rewards, self.ids, self.turns, self.states, self.actions, self.mask, **hyperparameters)

    def test_by_hand(self) -> None:
        """V(5) = ⅔, Q(5, 1) = ½, Q(5, 2) = 1; V(6) = ½ with Q 1 and 0; state 7 was visited once."""
        want = rows([-1 / 6, -1 / 6, 0.5], [-1 / 6, -0.5, 0], [1 / 3, 0, 0])
        torch.testing.assert_close(self.advantages(**PLAIN), want, **CLOSE)

    def test_the_prior_draws_to_the_mean_score(self) -> None:
        """V'(6) = (2 · ½ + 2 · ⅔) / 4 = 7/12, V'(7) = (1 + 2 · ⅔) / 3 = 7/9, V'(5) = ⅔ as before."""
        want = rows([-1 / 6, -1 / 6, 5 / 12], [-1 / 6, -7 / 12, 0], [1 / 3, 0, 2 / 9])
        torch.testing.assert_close(self.advantages(gamma=1.0), want, **CLOSE)

    def test_returns_are_discounted_by_turn_and_the_mean_score_is_not(self) -> None:
        """In state 5: returns ½, 0, ½, so V = ⅓, V' = (3 · ⅓ + 2 · ⅔) / 5 = 7/15, Q = ¼ and ½."""
        got = self.advantages(gamma=0.5)
        torch.testing.assert_close(got[:, 0], rows([0.25 - 7 / 15, 0.25 - 7 / 15, 0.5 - 7 / 15])[0], **CLOSE)

    def test_an_action_that_is_repeated_counts_once(self) -> None:
        """The first episode stays in (5, 1) for two turns: still two visits of (5, 1), and its return once."""
        states, actions = self.states.clone(), self.actions.clone()
        states[0, 2], actions[0, 2] = 5, 1
        got = rtmc(self.rewards, self.ids, self.turns, states, actions, self.mask, gamma=0.5, prior=0.0)
        # Q(5, 1) = mean of ½, the return of the first visit, and 0; V(5) = mean of ½, 0, ½.
        assert got[0].tolist() == pytest.approx([0.25 - 1 / 3] * 3)

    def test_actions_and_states_of_another_prompt_are_others(self) -> None:
        got = rtmc(self.rewards, torch.arange(3), self.turns, self.states, self.actions, self.mask, gamma=1.0)
        assert not got.any()

    def test_a_negative_prior_is_refused(self) -> None:
        with pytest.raises(ValueError, match="prior=-1"):
            self.advantages(prior=-1)


def test_if_no_action_is_taken_twice_it_is_gigpo_s_comparison() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) < 0.8
    turns, ids = torch.arange(5).expand(4, 5), torch.tensor([0, 0, 1, 1])
    states = torch.randint(2, (4, 5), generator=generator)
    got = rtmc(rewards, ids, turns, states, torch.arange(20).reshape(4, 5), mask, gamma=0.9, prior=0.0)
    both = gigpo(rewards, ids, turns, states, mask, gamma=0.9, normalize_std=False)
    torch.testing.assert_close(got, both - grpo(rewards, ids, mask, normalize_std=False), **CLOSE)


@given(st.integers(0, 2**31))
def test_rtmc_is_the_tree_of_visits_in_plain_python(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(5, 6, generator=generator) < 0.8
    turns = (torch.rand(mask.shape, generator=generator) < 0.6).cumsum(-1)
    of_turn = torch.randint(2, (2, 5, 7), generator=generator)
    states, actions = (x.gather(1, turns) for x in of_turn)
    outcome = torch.randn(5, generator=generator, dtype=torch.float64)
    ids = torch.tensor([0, 0, 0, 1, 1])
    got = rtmc(at_last_token(outcome, mask), ids, turns, states, actions, mask, gamma=0.5, prior=1.5)

    steps = [sorted({int(k) for k in turns[i][mask[i]]}) for i in range(5)]
    key = lambda i, k: (int(ids[i]), int(of_turn[0, i, k]), int(of_turn[1, i, k]))  # noqa: E731
    visits: dict[tuple[int, int, int], list[float]] = {}
    for i in range(5):
        first = {key(i, k): t for t, k in reversed(list(enumerate(steps[i])))}
        for pair, t in first.items():
            visits.setdefault(pair, []).append(0.5 ** (len(steps[i]) - 1 - t) * float(outcome[i]))
    score = [float(x) if s else 0.0 for x, s in zip(outcome, steps, strict=True)]
    for i in range(5):
        mean = sum(s for s, g in zip(score, ids, strict=True) if g == ids[i]) / int((ids == ids[i]).sum())
        for k in steps[i]:
            pair = key(i, k)
            of_state = [x for other, found in visits.items() if other[:2] == pair[:2] for x in found]
            q = sum(visits[pair]) / len(visits[pair])
            v = (sum(of_state) + 1.5 * mean) / (len(of_state) + 1.5)
            here = mask[i] & (turns[i] == k)
            assert got[i][here].tolist() == pytest.approx([q - v] * int(here.sum()), abs=1e-9)
    assert not got[~mask].any()
