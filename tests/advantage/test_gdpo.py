"""Each reward normalized alone."""

import pytest
import torch

from rlprims.advantage import gdpo, grpo, whiten
from rlprims.testing import check_advantage
from tests.records import STATISTICS_OF_THE_BATCH, Record, doubled

RECORDS = [
    Record(
        "advantage.gdpo",
        check_advantage,
        call={"weights": (1.0, 0.5)},
        matters={
            "weights": (1.0, 2.0),
            "normalize_std": False,
            "ddof": 0,
            "eps": 0.1,
            "singleton": "raw",
            "tolerance": 10.0,
            "whiten_over": "none",
            "whiten_eps": 0.1,
            "all_reduce": doubled,
        },
        exempt=STATISTICS_OF_THE_BATCH,
    ),
    Record(
        "advantage.gdpo",
        check_advantage,
        call={"weights": (1.0, 0.5), "whiten_over": "tokens"},
        exempt=STATISTICS_OF_THE_BATCH,
    ),
    Record("advantage.gdpo", check_advantage, call={"weights": (1.0, 0.5), "whiten_over": "none"}),
]

SCORES = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 10.0], [0.0, 20.0]], dtype=torch.float64)
IDS = torch.tensor([0, 0, 1, 1])
MASK = torch.ones(4, 1, dtype=torch.bool)
WEIGHTS = (1.0, 0.5)


def test_two_rewards_of_different_scale() -> None:
    """NeMo-RL 7ea279abf (no ε'), TRL 1.16.0 (ε = ε' = 1e-4).

    z = ±√½ and x = √½ (1, −1, ½, −½), whose σ² is 1.25/3: the second prompt's rewards pull against each other.
    """
    got = gdpo(SCORES, IDS, MASK, weights=WEIGHTS, eps=0.0, whiten_eps=0.0)[:, 0]
    assert got.tolist() == pytest.approx([1.095445, -1.095445, 0.547723, -0.547723], abs=1e-6)


def test_two_responses_are_enough() -> None:
    """z = ±√½, whose σ² is 1."""
    got = gdpo(SCORES[:2], IDS[:2], MASK[:2], weights=(1.0, 0.0), eps=0.0, whiten_eps=0.0)[:, 0]
    assert got.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_over_tokens_long_responses_count_for_more() -> None:
    """verl 0.9.1, for x = √½ (1, −1, ½, −½) on 1, 3, 1 and 1 tokens: μ = −√½ / 3."""
    mask = torch.tensor([[True, False, False], [True, True, True], [True, False, False], [True, False, False]])
    got = gdpo(SCORES, IDS, mask, weights=WEIGHTS, eps=0.0, whiten_over="tokens", whiten_eps=0.0)
    x = torch.tensor([1, -1, 0.5, -0.5], dtype=torch.float64) + 1 / 3
    std = ((x.square() * torch.tensor([1, 3, 1, 1])).sum() / 5).sqrt()
    torch.testing.assert_close(got[:, 0], x / std, rtol=0, atol=1e-12)
    assert (got[~mask] == 0).all()


def test_of_one_reward_it_is_grpo_and_then_whitening() -> None:
    mask = torch.tensor([[True, False], [True, True], [True, True], [True, False]])
    rewards = torch.stack([SCORES[:, 1], torch.zeros(4)], dim=1)
    want = whiten(grpo(rewards, IDS, mask), mask, eps=0.0)
    got = gdpo(SCORES[:, 1:], IDS, mask, whiten_over="tokens", whiten_eps=0.0)
    torch.testing.assert_close(got, want)
    plain = gdpo(SCORES[:, 1:], IDS, mask, whiten_over="none")
    torch.testing.assert_close(plain, grpo(rewards, IDS, mask))


def test_a_lead_by_two_rewards_beats_a_lead_by_one() -> None:
    scores = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    got = gdpo(scores, IDS, MASK, eps=0.0, whiten_over="none")[:, 0]
    assert got.tolist() == pytest.approx([2**0.5, -(2**0.5), 0.5**0.5, -(0.5**0.5)])
    summed = grpo(scores.sum(1, keepdim=True), IDS, MASK, eps=0.0)[:, 0]
    assert summed[0] == pytest.approx(float(summed[2]))


def test_a_reward_that_is_the_same_for_all_says_nothing() -> None:
    scores = torch.cat([SCORES[:, :1], torch.full((4, 1), 1000.1)], dim=1)
    torch.testing.assert_close(gdpo(scores, IDS, MASK), gdpo(SCORES[:, :1], IDS, MASK))
    assert (gdpo(torch.full((4, 2), 0.7), IDS, MASK) == 0).all()


def test_the_unit_of_a_reward_cancels() -> None:
    scaled = SCORES * torch.tensor([1.0, 1e3])
    got, want = (gdpo(s, IDS, MASK, weights=WEIGHTS, eps=0.0) for s in (scaled, SCORES))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


def test_an_empty_response_and_a_row_left_out() -> None:
    mask = torch.tensor([[True], [True], [True], [True], [False]])
    scores = torch.cat([SCORES, torch.full((1, 2), torch.nan)])
    valid = torch.tensor([True] * 4 + [False])
    got = gdpo(scores, torch.tensor([0, 0, 1, 1, 1]), mask, valid_rows=valid)
    torch.testing.assert_close(got[:4], gdpo(SCORES, IDS, MASK), rtol=0, atol=1e-12)
    assert got[4] == 0


def test_a_group_of_one_may_keep_its_scores() -> None:
    """As verl 0.9.1, but for its division by 1 + ε."""
    scores, ids = torch.tensor([[3.0, 2.0], [1.0, 0.0], [0.0, 0.0]], dtype=torch.float64), torch.tensor([1, 0, 0])
    got = gdpo(scores, ids, MASK[:3], weights=WEIGHTS, eps=0.0, singleton="raw", whiten_over="none")[:, 0]
    assert got.tolist() == pytest.approx([4, 0.5**0.5, -(0.5**0.5)])
    assert gdpo(scores, ids, MASK[:3], weights=WEIGHTS)[0, 0] == 0


def test_two_ranks_agree_with_one() -> None:
    both = gdpo(SCORES.repeat(2, 1), torch.cat([IDS, IDS + 2]), MASK.repeat(2, 1))
    one = gdpo(SCORES, IDS, MASK, all_reduce=lambda x: 2 * x)
    torch.testing.assert_close(one, both[:4], rtol=0, atol=1e-12)


def test_weights_of_another_number_are_refused() -> None:
    with pytest.raises(ValueError, match="weights has 3 entries, expected 2"):
        gdpo(SCORES, IDS, MASK, weights=(1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="component_scores"):
        gdpo(SCORES[:, 0], IDS, MASK)
