"""V-trace."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.advantage import gae, vtrace, vtrace_returns
from rlprims.testing import check_advantage
from tests.records import FIRST_OF_TWO, Record

RECORDS = [
    Record(
        "advantage.vtrace",
        check_advantage,
        matters={
            **{"gamma": 0.9, "lam": 0.5, "clip_rho": 0.8, "clip_c": 0.8, "clip_pg_rho": 0.8},
            "shard": FIRST_OF_TWO,
        },
    ),
    Record("advantage.vtrace", check_advantage, call={"gamma": 0.9, "lam": 0.5, "clip_rho": 2.0, "clip_pg_rho": 3.0}),
    Record(
        "advantage.vtrace_returns",
        check_advantage,
        matters={"gamma": 0.9, "lam": 0.5, "clip_rho": 0.8, "clip_c": 0.8, "shard": FIRST_OF_TWO},
    ),
]

CLOSE = {"rtol": 0, "atol": 1e-12}
REWARDS, VALUES = (torch.tensor([x], dtype=torch.float64) for x in ([0.0, 1.0], [0.5, 0.5]))
SAMPLED = torch.full((1, 2), -1.0, dtype=torch.float64)
LEARNED = SAMPLED + torch.tensor([[0.5, 4.0]], dtype=torch.float64).log()
FULL = torch.ones(1, 2, dtype=torch.bool)


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def test_ratios_of_a_half_and_four() -> None:
    """rlax 0.1.9. E1 = 1 · (1 − 0.5); E0 = 0.5 (0 + 0.5 − 0.5) + 0.5 E1; A0 = 0.5 (0 + 1 − 0.5); A1 = 1 (1 − 0.5)."""
    data = (REWARDS, VALUES, LEARNED, SAMPLED, FULL)
    torch.testing.assert_close(vtrace_returns(*data), row(0.75, 1), **CLOSE)
    torch.testing.assert_close(vtrace(*data), row(0.25, 0.5), **CLOSE)


def test_vtrace_with_each_bound_by_hand() -> None:
    """rlax 0.1.9 (its c is 1): with ρ̄ = 3, E1 = 1.5 and E0 = 0.75; with ρ̄_pg = 2, A0 = 0.5 · 1.5 and A1 = 2 · 0.5."""
    data = (REWARDS, VALUES, LEARNED, SAMPLED, FULL)
    torch.testing.assert_close(vtrace_returns(*data, clip_rho=3.0), row(1.25, 2), **CLOSE)
    torch.testing.assert_close(vtrace(*data, clip_rho=3.0, clip_pg_rho=2.0), row(0.75, 1), **CLOSE)
    torch.testing.assert_close(vtrace_returns(*data, clip_c=0.1), row(0.55, 1), **CLOSE)


def test_lambda_mixes_the_target_with_the_critic() -> None:
    """rlax 0.1.9: E0 = λ 0.5 E1, and A0 = 0.5 (V1 + λ E1 − V0)."""
    data = (REWARDS, VALUES, LEARNED, SAMPLED, FULL)
    torch.testing.assert_close(vtrace_returns(*data, lam=0.5), row(0.625, 1), **CLOSE)
    torch.testing.assert_close(vtrace(*data, lam=0.5), row(0.125, 0.5), **CLOSE)


@given(st.lists(st.booleans(), min_size=1, max_size=10), st.floats(0, 1), st.integers(0, 2**31))
def test_on_policy_it_is_gae(holes: list[bool], gamma: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([holes])
    rewards, values, log_probs = torch.randn(3, 1, len(holes), generator=generator, dtype=torch.float64)
    beyond = torch.randn(1, generator=generator, dtype=torch.float64)
    got = vtrace(rewards, values, log_probs, log_probs, mask, bootstrap_values=beyond, gamma=gamma)
    want = gae(rewards, values, mask, bootstrap_values=beyond, gamma=gamma, lam=1.0)
    torch.testing.assert_close(got, want, **CLOSE)


@given(st.lists(st.booleans(), min_size=1, max_size=10), st.floats(0, 1), st.integers(0, 2**31))
def test_vtrace_equals_that_of_the_sequence_without_its_gaps(holes: list[bool], lam: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([holes])
    data = torch.randn(4, 1, len(holes), generator=generator, dtype=torch.float64)
    short = [x[mask][None] for x in data]
    beyond = torch.randn(1, generator=generator, dtype=torch.float64)
    for fn in (vtrace, vtrace_returns):
        got = fn(*data, mask, bootstrap_values=beyond, gamma=0.9, lam=lam)[mask]
        want = fn(*short, mask[mask][None], bootstrap_values=beyond, gamma=0.9, lam=lam)[0]
        torch.testing.assert_close(got, want, **CLOSE)


def test_a_policy_that_has_left_gives_no_advantage() -> None:
    got = vtrace(REWARDS, VALUES, SAMPLED - 900.0, SAMPLED, FULL)
    assert got.abs().max() < 1e-8
    assert vtrace(REWARDS, VALUES, SAMPLED + 900.0, SAMPLED, FULL)[0].tolist() == pytest.approx([0.5, 0.5])
