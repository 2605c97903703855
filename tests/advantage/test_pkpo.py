"""Pass@k for k below the group's size: against all subsets, and against the exact gradient of a small policy."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.advantage import pkpo, rloo
from rlprims.testing import check_advantage
from tests.records import Record

RECORDS = [
    Record("advantage.pkpo", check_advantage, call={"k": 2}, matters={"k": 1, "baseline": "leave_one_out"}),
    Record("advantage.pkpo", check_advantage, call={"k": 1, "baseline": "leave_one_out"}),
    Record("advantage.pkpo", check_advantage, call={"k": 2, "baseline": "leave_one_out"}),
    Record(
        "advantage.pkpo",
        check_advantage,
        call={"k": 3, "baseline": "none"},
        exempt={
            "equal rewards give zero": "has no baseline",
            "a shift of a group cancels": "has no baseline",
        },
    ),
]

BASELINES = ("leave_one_out_minus_one", "leave_one_out", "none")


def per_response(scores: list[float], k: int, baseline: str = BASELINES[0]) -> list[float]:
    rewards, mask = torch.tensor(scores, dtype=torch.float64)[:, None], torch.ones(len(scores), 1, dtype=torch.bool)
    return pkpo(rewards, torch.zeros(len(scores), dtype=torch.int64), mask, k=k, baseline=baseline)[:, 0].tolist()


def over_subsets(scores: list[float], k: int, baseline: str) -> list[float]:
    """The definition, subset by subset."""
    n, rows = len(scores), range(len(scores))
    paid = []
    for i in rows:
        others = [j for j in rows if j != i]
        without = [max(scores[j] for j in s) for s in itertools.combinations(others, k)]
        total = 0.0
        for company in itertools.combinations(others, k - 1):
            base = {
                "none": lambda: 0.0,
                "leave_one_out": lambda w=without: math.fsum(w) / len(w),
                "leave_one_out_minus_one": lambda c=company: max(scores[j] for j in c),
            }[baseline]()
            total += max(scores[i], *(scores[j] for j in company), -math.inf) - base
        paid.append(n / math.comb(n, k) * total)
    return paid


def test_pkpo_of_one_right_of_four() -> None:
    """It is best, and adds 1, in each of the 3 pairs that it is in: 4/6 · 3."""
    assert per_response([1, 0, 0, 0], 2) == pytest.approx([2, 0, 0, 0])


def test_two_right_of_four() -> None:
    """Each adds 1 to 2 of its 3 pairs."""
    assert per_response([0, 1, 0, 1], 2) == pytest.approx([0, 4 / 3, 0, 4 / 3])


def test_pkpo_of_all_of_the_group() -> None:
    """k = n: the lead over the second, n/1 times."""
    assert per_response([0.25, 1, 0.5], 3) == pytest.approx([0, 1.5, 0])


@given(
    st.lists(st.sampled_from([-1.0, 0.0, 0.3, 1.0, 7.0]), min_size=3, max_size=6), st.sampled_from(BASELINES), st.data()
)
def test_pkpo_is_the_sum_over_subsets(scores: list[float], baseline: str, data: st.DataObject) -> None:
    low, high = {"leave_one_out_minus_one": (2, 0), "leave_one_out": (1, 1), "none": (1, 0)}[baseline]
    k = data.draw(st.integers(low, len(scores) - high))
    assert per_response(scores, k, baseline) == pytest.approx(over_subsets(scores, k, baseline), abs=1e-9)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("k", [1, 2])
def test_pkpo_has_the_gradient_of_pass_at_k_as_its_expectation(k: int, baseline: str) -> None:
    """All 27 samples of size 3 from a policy over three answers."""
    logits = torch.tensor([0.3, -0.5, 0.1], dtype=torch.float64, requires_grad=True)
    rewards = [0.0, 1.0, 0.4]
    log_pi = logits.log_softmax(0)
    best = sum(
        log_pi[list(sample)].sum().exp() * max(rewards[a] for a in sample)
        for sample in itertools.product(range(3), repeat=k)
    )
    (exact,) = torch.autograd.grad(best, logits, retain_graph=True)
    got = torch.zeros_like(exact)
    for sample in itertools.product(range(3), repeat=3):
        weights = torch.tensor(per_response([rewards[a] for a in sample], k, baseline), dtype=torch.float64)
        (slope,) = torch.autograd.grad((weights * log_pi[list(sample)]).mean(), logits, retain_graph=True)
        got += log_pi[list(sample)].sum().exp().detach() * slope
    torch.testing.assert_close(got, exact, rtol=0, atol=1e-12)


def test_of_one_it_is_rloo() -> None:
    rewards = torch.tensor([[1.0], [0.0], [4.0], [2.0], [2.5]])
    mask, ids = torch.ones(5, 1, dtype=torch.bool), torch.tensor([0, 1, 0, 1, 0])
    torch.testing.assert_close(pkpo(rewards, ids, mask, k=1), rloo(rewards, ids, mask))


def test_groups_of_fewer_than_k_get_zero() -> None:
    rewards, mask = torch.tensor([[1.0], [0.0], [4.0], [2.0], [3.0]]), torch.ones(5, 1, dtype=torch.bool)
    got = pkpo(rewards, torch.tensor([0, 0, 1, 1, 1]), mask, k=3)[:, 0]
    assert got.tolist() == [0, 0, 3, 0, 0]
    assert (pkpo(rewards, torch.tensor([0, 0, 1, 1, 1]), mask, k=3, baseline="leave_one_out") == 0).all()


def test_hundreds_of_samples_do_not_overflow() -> None:
    rewards, mask = torch.zeros(512, 1), torch.ones(512, 1, dtype=torch.bool)
    rewards[17] = 1.0
    got = pkpo(rewards, torch.zeros(512, dtype=torch.int64), mask, k=256)[:, 0]
    assert got[17] == pytest.approx(256)
    assert got.isfinite().all()


def test_k_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="k=0, expected"):
        per_response([1, 0], 0)


@pytest.mark.parametrize("baseline", ["leave_one_out_minus_one", "leave_one_out", "none"])
@pytest.mark.parametrize("number", [1e30, 3e38, torch.inf, torch.nan])
def test_a_group_keeps_its_digits_beside_one_of_large_numbers(number: float, baseline: str) -> None:
    rewards = torch.tensor([[number], [0.25], [1.0], [0.0], [-number], [0.5], [0.5], [0.125]])
    ids, mask = torch.tensor([0, 1, 1, 1, 0, 1, 0, 1]), torch.ones(8, 1, dtype=torch.bool)
    alone = pkpo(rewards[ids == 1], torch.zeros(5, dtype=torch.int64), mask[:5], k=3, baseline=baseline)
    got = pkpo(rewards, ids, mask, k=3, baseline=baseline)
    torch.testing.assert_close(got[ids == 1], alone, rtol=1e-6, atol=1e-7)
