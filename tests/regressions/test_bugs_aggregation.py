"""From tokens to a step: one mode for every loss, and denominators that no split changes."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlprims import losses
from rlprims.losses import (
    count_totals,
    gspo,
    seq_mean_token_mean,
    seq_mean_token_sum,
    token_mean,
    token_sum,
)
from rlprims.types import Totals

M = torch.arange(6) < torch.tensor([6, 2, 4])[:, None]
POLICY_LOSSES: dict[str, Callable[..., Tensor]] = {
    name: f
    for name in losses.__all__
    if {"log_probs", "advantages"} <= set(inspect.signature(f := getattr(losses, name)).parameters)
}


def noise(seed: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_l7_every_loss_takes_every_mode(name: str) -> None:
    """verl: sapo and geo_mean aggregate in their own way, whatever loss_agg_mode says."""
    loss = POLICY_LOSSES[name]
    data = {"log_probs": -noise(0).abs(), "advantages": noise(1), "response_mask": M}
    data |= {"old_log_probs": -noise(2).abs(), "rollout_log_probs": -noise(3).abs(), "expert_mask": noise(4) > 0}
    data |= {"ref_log_probs": -noise(5).abs(), "group_ids": torch.tensor([0, 1, 0])}
    per_token = loss(**{k: v for k, v in data.items() if k in inspect.signature(loss).parameters})
    assert per_token.shape == M.shape
    modes = token_sum, token_mean, seq_mean_token_sum, seq_mean_token_mean
    assert len({round(mode(per_token, M).item(), 9) for mode in modes}) == 4


def test_l8_a_sequence_loss_does_not_grow_with_the_length() -> None:
    """trl#3823: (B, 1) losses times a (B, T) mask weigh each response by its tokens."""
    ratio, advantages = torch.full((3, 6), 0.0001), torch.ones(3, 6)
    per_token = gspo(ratio, torch.zeros(3, 6), advantages, M)
    assert seq_mean_token_mean(per_token, M).item() == pytest.approx(-torch.tensor(0.0001).exp().item(), rel=1e-6)
    peer = (per_token[:, :1] * M).sum() / 3
    assert peer < -3.9


def test_l1_l12_a_response_cut_into_spans_is_the_same_step() -> None:
    """ROLL 53c6da31, slime f9f00b2cb, AReaL 95e2379d0: context parallel ranks each divided by their own tokens."""
    x, totals = noise(4), count_totals(M)
    parts = [token_mean(x[:, part], M[:, part], totals=totals) for part in (slice(0, 3), slice(3, 6))]
    torch.testing.assert_close(parts[0] + parts[1], token_mean(x, M))
    own = [token_mean(x[:, part], M[:, part]) for part in (slice(0, 3), slice(3, 6))]
    assert ((own[0] + own[1]) / 2 - token_mean(x, M)).abs() > 0.01


def test_l3_the_denominator_is_that_of_the_step_it_is_given_with() -> None:
    """trl#5619: the count of one generation step divided the losses of another."""
    x = torch.ones(3, 6)
    assert token_mean(x, M, totals=Totals(tokens=12, sequences=3, groups=1)) == 1
    assert token_mean(x, M, totals=Totals(tokens=24, sequences=3, groups=1)) == 0.5


def test_l5_l6_b8_a_micro_batch_without_a_token_is_zero_and_can_be_differentiated() -> None:
    """verl, OpenRLHF: 0 / 0. ROLL's first mend returned a constant, and the other ranks waited for its backward."""
    x = torch.full((2, 3), torch.nan, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    loss = token_mean(x, nothing)
    loss.backward()
    assert loss == 0
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros(2, 3))
    assert (torch.zeros(()) / nothing.sum()).isnan()


def test_l2_l9_b10_a_row_that_is_masked_out_weighs_nothing() -> None:
    """trl 7c1fa85ad counted the tokens of masked rows; verl changed its mind twice on the rows."""
    x, kept = torch.ones(3, 6), M & torch.tensor([[True], [False], [True]])
    assert token_mean(x, kept) == seq_mean_token_mean(x, kept) == 1
    assert (x * kept).sum() / M.sum() < 0.9
