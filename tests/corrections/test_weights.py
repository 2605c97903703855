"""Factors of the loss: what they multiply to, what they account for, and what torch.compile makes of them."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from rlprims.corrections import Weights, geometric_gate, importance_weights, mis, seq_mask_tis, tis, token_veto
from rlprims.losses import clipped_surrogate, count_totals, token_mean
from rlprims.testing import check_reward
from tests.records import Record

RECORDS = [
    Record("corrections.replace_nonfinite", check_reward),
]

TRAINER = torch.tensor([[0.5, 0.4, 0.2], [0.5, 0.5, 1e-7]], dtype=torch.float64).log()
SAMPLER = torch.tensor([[0.4, 0.5, 0.2], [0.5, 0.5, 0.9]], dtype=torch.float64).log()
MASK = torch.ones(2, 3, dtype=torch.bool)


def test_a_product_multiplies_the_values() -> None:
    got = tis(TRAINER, SAMPLER, MASK) * token_veto(TRAINER, SAMPLER, MASK)
    assert got.values.tolist() == [pytest.approx([1.25, 0.8, 1.0]), [0.0, 0.0, 0.0]]


def test_a_product_accounts_for_the_gaps_of_both() -> None:
    weights, gate = tis(TRAINER, SAMPLER, MASK), geometric_gate(TRAINER, SAMPLER, MASK)
    assert weights.corrected == {"rollout->old"}
    assert gate.corrected == frozenset()
    assert (gate * weights * gate).corrected == {"rollout->old"}
    other = Weights(torch.ones(2, 3), frozenset({"old->new"}))
    assert (weights * other).corrected == {"rollout->old", "old->new"}


def test_the_same_gap_is_not_corrected_twice() -> None:
    with pytest.raises(ValueError, match="correcting twice: both factors account for rollout->old"):
        tis(TRAINER, SAMPLER, MASK) * mis(TRAINER, SAMPLER, MASK)
    with pytest.raises(ValueError, match="correcting twice"):
        token_veto(TRAINER, SAMPLER, MASK) * seq_mask_tis(TRAINER, SAMPLER, MASK) * importance_weights(
            TRAINER, SAMPLER, MASK
        )


def test_rejected_tokens_count_unless_they_leave_the_mask() -> None:
    advantages = torch.ones(2, 3, dtype=torch.float64)
    gate = token_veto(TRAINER, SAMPLER, MASK)
    losses = clipped_surrogate(TRAINER, TRAINER, advantages, MASK)
    assert token_mean(losses * gate.values, MASK).item() == pytest.approx(-0.5)
    kept = MASK & (gate.values > 0)
    totals = count_totals(kept)
    assert token_mean(losses * gate.values, kept, totals=totals).item() == pytest.approx(-1.0)


def test_a_loss_with_weights_compiles_in_one_graph() -> None:
    def loss(log_probs: torch.Tensor) -> torch.Tensor:
        weights = tis(TRAINER, SAMPLER, MASK) * token_veto(TRAINER, SAMPLER, MASK)
        return token_mean(
            clipped_surrogate(log_probs, TRAINER, torch.ones_like(log_probs), MASK) * weights.values, MASK
        )

    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    assert torch.equal(compiled(TRAINER + 0.1), loss(TRAINER + 0.1))


def test_weights_are_fixed_and_compared_by_identity() -> None:
    values = torch.ones(1)
    weights = Weights(values)
    with pytest.raises(FrozenInstanceError):
        weights.values = values + 1
    assert weights == weights
    assert weights != Weights(values)
