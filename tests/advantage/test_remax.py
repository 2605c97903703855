"""The greedy response as baseline."""

import torch

from rlprims.advantage import remax
from rlprims.testing import check_advantage
from tests.records import Record

RECORDS = [
    Record("advantage.remax", check_advantage),
]


def test_reward_to_go_less_the_greedy_score() -> None:
    rewards = torch.tensor([[0.5, 0.0, 1.0], [2.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    got = remax(rewards, torch.tensor([0.25, 3.0]), mask)
    assert got.tolist() == [[1.25, 0.75, 0.75], [-1.0, 0.0, 0.0]]


def test_tool_tokens_get_nothing() -> None:
    got = remax(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([1.0]), torch.tensor([[True, False, True]]))
    assert got.tolist() == [[0.0, 0.0, 0.0]]
