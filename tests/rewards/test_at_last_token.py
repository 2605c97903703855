"""The outcome goes on the last token that the policy sampled, or nowhere."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.rewards import at_last_token
from rlprims.testing import check_reward
from tests.records import Record

RECORDS = [
    Record("rewards.at_last_token", check_reward),
]


def test_ragged_rows_tool_tokens_and_an_empty_response() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]]).bool()
    got = at_last_token(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)
    assert got.tolist() == [[0, 1, 0, 0], [0, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, 4]]


def test_packed_with_empty_sequences() -> None:
    mask = torch.tensor([True, False, True, True])
    got = at_last_token(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask, torch.tensor([0, 0, 2, 2, 4]))
    assert got.tolist() == [2, 0, 0, 4]


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6))
def test_each_response_gets_its_score_once(rows: list[list[bool]]) -> None:
    mask = torch.tensor(rows)
    scores = torch.arange(1.0, len(rows) + 1)
    got = at_last_token(scores, mask)
    assert torch.equal(got.sum(-1), torch.where(mask.any(-1), scores, 0.0))
    assert (got[~mask] == 0).all()
