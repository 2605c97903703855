"""SPO: s − v over the batch, where v is what a prompt's history says."""

import pytest
import torch

from rlprims.advantage import grpo, remax, spo
from rlprims.rewards import at_last_token
from rlprims.testing import check_advantage
from tests.records import STATISTICS_OF_THE_BATCH, Record, doubled

RECORDS = [
    Record(
        "advantage.spo",
        check_advantage,
        matters={"ddof": 0, "eps": 0.1, "all_reduce": doubled},
        exempt=STATISTICS_OF_THE_BATCH,
    ),
]

MASK = torch.tensor([[True, True, False], [True, False, False], [True, True, True], [True, True, False]])
SCORES = torch.tensor([1.0, 1.0, 0.0, 0.0])
VALUES = torch.tensor([0.5, 0.25, 0.75, 0.0])


def test_by_hand() -> None:
    """d = (1/2, 3/4, −3/4, 0), mean 1/8; squares 9/64 + 25/64 + 49/64 + 1/64 = 84/64, variance 7/16."""
    got = spo(at_last_token(SCORES, MASK), VALUES, MASK, eps=0.0)
    wanted = torch.tensor([3 / 8, 5 / 8, -7 / 8, -1 / 8]) / (7 / 16) ** 0.5
    torch.testing.assert_close(got, torch.where(MASK, wanted[:, None], 0.0))


def test_a_right_answer_that_was_expected_counts_less_than_one_that_was_not() -> None:
    first, second = spo(at_last_token(SCORES, MASK), VALUES, MASK)[:2, 0].tolist()
    assert 0 < first < second


def test_spo_with_one_value_for_all_is_the_z_score_of_the_batch() -> None:
    rewards = at_last_token(SCORES, MASK)
    alike = spo(rewards, torch.full((4,), 0.3), MASK, eps=0.0)
    torch.testing.assert_close(alike, grpo(rewards, torch.zeros(4, dtype=torch.int64), MASK, eps=0.0))


def test_up_to_shift_and_scale_it_is_the_baselined_return() -> None:
    rewards = at_last_token(SCORES, MASK)
    advantages = spo(rewards, VALUES, MASK, eps=0.0)[:, 0]
    beyond_the_value = remax(rewards, VALUES, MASK)[:, 0]
    z_scores = (beyond_the_value - beyond_the_value.mean()) / beyond_the_value.std()
    torch.testing.assert_close(advantages, z_scores)


def test_rows_that_do_not_count_and_rows_without_tokens_are_in_no_statistic() -> None:
    rewards, values = at_last_token(SCORES, MASK), VALUES.clone()
    values[3] = torch.nan
    empty = MASK.clone()
    empty[3] = False
    without = spo(rewards[:3], VALUES[:3], MASK[:3])
    for got in (
        spo(rewards, values, MASK, valid_rows=torch.tensor([True, True, True, False])),
        spo(rewards, values, empty),
    ):
        torch.testing.assert_close(got[:3], without)
        assert (got[3] == 0).all()


def test_a_batch_with_the_expected_scores_gives_zero() -> None:
    for eps in (1e-8, 0.0):
        assert (spo(at_last_token(SCORES, MASK), SCORES - 0.5, MASK, eps=eps) == 0).all()
    one = MASK[:1]
    assert (spo(at_last_token(SCORES[:1], one), VALUES[:1], one) == 0).all()


def test_a_value_for_each_response_is_needed() -> None:
    with pytest.raises(ValueError, match="baseline_scores"):
        spo(at_last_token(SCORES, MASK), VALUES[:2], MASK)
