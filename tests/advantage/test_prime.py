"""Process rewards and outcomes, leave-one-out; and where the rewards come from."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from rlprims.advantage import discounted_returns, prime, rloo
from rlprims.layout import sequence_sum
from rlprims.losses import implicit_reward
from rlprims.rewards import implicit_process
from rlprims.testing import check_advantage, check_reward
from tests.records import BY_TOKEN, Record

RECORDS = [
    Record(
        "advantage.prime",
        check_advantage,
        matters={"gamma": 0.9, "process_weight": 0.5},
        exempt={
            **BY_TOKEN,
            "equal rewards give zero": "process rewards differ where outcomes are equal",
            "a scale passes or cancels": "process rewards are not scaled with the outcome",
        },
    ),
    Record("rewards.implicit_process", check_reward, matters={"beta": 0.5}),
]

CLOSE = {"rtol": 0, "atol": 1e-12}


def rows(*numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


IDS = torch.zeros(3, dtype=torch.int64)
MASK = torch.tensor([[True, False, True], [True, True, True], [True, False, False]])
PROCESS = rows([1, 9, 3], [0, 3, 6], [5, 9, 9])  # means 2, 3 and 5
OUTCOME = rows([0, 9, 1], [0, 0, 0], [1, 9, 9])


def test_by_hand() -> None:
    """Of the others: 4, 3.5 and 2.5. Outcomes 1, 0, 1: leave-one-out ½, −1, ½."""
    want = rows([-3 - 1 + 0.5, 0, -1 + 0.5], [-3.5 - 0.5 + 2.5 - 1, -0.5 + 2.5 - 1, 2.5 - 1], [2.5 + 0.5, 0, 0])
    torch.testing.assert_close(prime(OUTCOME, PROCESS, IDS, MASK), want, **CLOSE)


def test_the_discount_is_of_process_rewards_and_skips_tool_output() -> None:
    got = prime(OUTCOME, PROCESS, IDS, MASK, gamma=0.5)
    torch.testing.assert_close(got[0], rows([-3 - 0.5 + 0.5, 0, -1 + 0.5])[0], **CLOSE)


def test_prime_without_process_rewards_is_rloo() -> None:
    none = prime(OUTCOME, PROCESS, IDS, MASK, process_weight=0.0)
    torch.testing.assert_close(none, rloo(OUTCOME, IDS, MASK), **CLOSE)
    torch.testing.assert_close(prime(OUTCOME, torch.ones_like(PROCESS), IDS, MASK), rloo(OUTCOME, IDS, MASK), **CLOSE)


def test_beside_the_authors_code() -> None:
    """It has n/(n−1) p_it − Σ_j p̄_j / (n−1): more by (p_it − p̄_i) / (n−1), which adds up to 0 over a response."""
    mean = rows([2, 3, 5])[0]
    authors = torch.where(MASK, PROCESS * 3 / 2 - mean.sum() / 2, 0.0)
    more = torch.where(MASK, (PROCESS - mean[:, None]) / 2, 0.0)
    torch.testing.assert_close(more.sum(-1), torch.zeros(3, dtype=torch.float64), **CLOSE)
    want = discounted_returns(authors - more, MASK) + rloo(OUTCOME, IDS, MASK)
    torch.testing.assert_close(prime(OUTCOME, PROCESS, IDS, MASK), want, **CLOSE)


def test_a_group_of_one_has_no_baseline() -> None:
    assert not prime(OUTCOME, PROCESS, torch.arange(3), MASK).any()


def test_a_model_that_learnt_from_outcomes_rewards_tokens() -> None:
    """σ(Σ r) is the chance of being right, and the loss its cross-entropy; β is the same in both."""
    phi, ref = -torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    right = torch.tensor([True, False, True])
    r = implicit_process(phi, ref, MASK, beta=0.5)
    torch.testing.assert_close(r, torch.where(MASK, 0.5 * (phi - ref), 0.0), **CLOSE)
    chance = sequence_sum(r, MASK).sigmoid()
    losses = implicit_reward(sequence_sum(phi, MASK), sequence_sum(ref, MASK), right, beta=0.5)
    torch.testing.assert_close(losses, binary_cross_entropy(chance, right.double(), reduction="none"), **CLOSE)


def test_the_chance_moves_towards_the_outcome() -> None:
    phi = torch.zeros(2, requires_grad=True)
    implicit_reward(phi, torch.zeros(2), torch.tensor([True, False])).sum().backward()
    assert phi.grad is not None
    assert phi.grad.sign().tolist() == [-1, 1]


@pytest.mark.parametrize("beta", [0.0, -0.1])
def test_a_beta_that_is_not_positive_is_refused(beta: float) -> None:
    with pytest.raises(ValueError, match="beta="):
        implicit_process(PROCESS, PROCESS, MASK, beta=beta)
    with pytest.raises(ValueError, match="beta="):
        implicit_reward(PROCESS[:, 0], PROCESS[:, 0], torch.tensor([True, False, True]), beta=beta)
