"""Metrics: merged by their type, and of one sample."""

import pytest
import torch

from rlprims.diagnostics import length_correlation, mean_over_tokens, pass_at_k, response_stats
from rlprims.types import Max, Mean, merge_metrics


def test_b23_a_metric_is_reduced_by_its_type_and_not_by_its_name() -> None:
    """verl's reduce_metrics takes the maximum of every name with "max" in it, the mean of medians called "min" too."""
    parts = [
        {"softmax_loss": Mean(torch.tensor(total), torch.tensor(1)), "top": Max(torch.tensor(total))}
        for total in (1.0, 3.0)
    ]
    merged = merge_metrics(*parts)
    assert (merged["softmax_loss"].value(), merged["top"].value()) == (2.0, 3.0)


def test_l13_a_rank_with_one_token_weighs_one_token() -> None:
    """trl c1f6f24e1: the mean of the ranks' means."""
    ranks = [torch.zeros(1, 1000), torch.ones(1, 1)]
    parts = [mean_over_tokens(x, torch.ones_like(x, dtype=torch.bool)) for x in ranks]
    assert parts[0].merge(parts[1]).value() == pytest.approx(1 / 1001)
    assert sum(float(part.value()) for part in parts) / 2 == 0.5


def test_g8_one_sample_has_metrics() -> None:
    """NeMo-RL 55f09e380: the standard deviation of one value ended the run."""
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert response_stats(torch.tensor([0.5]), mask)["score"].value() == 0.5
    assert length_correlation(torch.tensor([0.5]), mask).value() == 0


def test_b22_pass_at_k_draws_nothing_and_is_not_low() -> None:
    """verl draws with replacement from numpy's global generator, 0.62 where the 32 samples hold one success."""
    state = torch.get_rng_state()
    got = pass_at_k(torch.arange(32) == 3, torch.zeros(32, dtype=torch.int64), k=32).value()
    assert got == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert 1 - (31 / 32) ** 32 < 0.64
