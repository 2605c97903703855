"""The optimal value under a KL penalty."""

import math

import pytest
import torch

from rlprims.advantage import optimal_value, remax
from rlprims.testing import check_advantage
from tests.records import Record

RECORDS = [
    Record("advantage.optimal_value", check_advantage, matters={"beta": 2.0}),
    Record("advantage.optimal_value", check_advantage, call={"beta": 0.01}),
]

SCORES = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.3, 0.7], dtype=torch.float64)
IDS = torch.tensor([0, 0, 0, 0, 1, 1])


def test_optimal_value_of_one_right_of_four() -> None:
    """TRL 1.16.0, experimental A2PO: ½ (logsumexp(2, 0, 0, 0) − log 4)."""
    want = 0.5 * math.log((math.exp(2) + 3) / 4)
    assert optimal_value(SCORES, IDS)[:4].tolist() == pytest.approx([want] * 4, abs=1e-12)


def test_between_the_mean_and_the_best() -> None:
    assert optimal_value(SCORES, IDS, beta=1e6)[[0, 4]].tolist() == pytest.approx([0.25, 0.5], abs=1e-6)
    assert optimal_value(SCORES, IDS, beta=1e-4)[[0, 4]].tolist() == pytest.approx([1, 0.7], abs=1e-3)


def test_of_one_response_it_is_its_score() -> None:
    assert optimal_value(SCORES, torch.arange(6)).tolist() == pytest.approx(SCORES.tolist(), abs=1e-12)


def test_optimal_value_is_the_optimum_of_reward_less_kl() -> None:
    """Over a policy of three answers, π* ∝ π_ref exp(s/β), by gradient: no policy beats it, and π* attains it."""
    beta, scores, reference = 0.5, torch.tensor([1.0, 0.2, -0.3], dtype=torch.float64), torch.tensor([1, 2, 5]) / 8
    # the expectation over the reference, as a sample in which each answer is as frequent as it is likely
    sample = scores.repeat_interleave(torch.tensor([1, 2, 5]))
    value = optimal_value(sample, torch.zeros(8, dtype=torch.int64), beta=beta)[0]

    def objective(p: torch.Tensor) -> torch.Tensor:
        return (p * (scores - beta * (p / reference).log())).sum()

    best = (scores / beta).exp() * reference
    assert float(objective(best / best.sum())) == pytest.approx(float(value), abs=1e-12)
    for seed in range(20):
        other = torch.rand(3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert objective(other / other.sum()) < value


def test_large_scores_do_not_overflow() -> None:
    got = optimal_value(torch.tensor([1e4, 1e4, -1e30]), torch.tensor([0, 0, 0]), beta=0.01)
    assert got.tolist() == pytest.approx([1e4 + 0.01 * math.log(2 / 3)] * 3)


def test_a_response_is_compared_with_what_the_reference_sampled() -> None:
    """Rows 0 to 2 are the reference's, row 3 is the policy's."""
    valid = torch.tensor([True, True, True, False, False, False])
    values = optimal_value(SCORES, IDS, valid, beta=1e6)
    assert values.tolist() == pytest.approx([1 / 3] * 4 + [0, 0], abs=1e-6)
    policy = remax(torch.tensor([[0.0, 0.9]]), values[3:4], torch.ones(1, 2, dtype=torch.bool))
    assert policy[0].tolist() == pytest.approx([0.9 - 1 / 3] * 2, abs=1e-6)


def test_a_beta_that_is_not_positive_and_scores_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"beta=0\.0, expected"):
        optimal_value(SCORES, IDS, beta=0.0)
    with pytest.raises(ValueError, match="scores has shape"):
        optimal_value(SCORES[:3], IDS)
