"""Metrics by hand, merged over parts, and of nothing at all."""

import math

import pytest
import torch

from rlprims.diagnostics import explained_variance, policy_update, responses, sampler_mismatch, token_mean

MASK = torch.tensor([[True, True, True], [True, False, False]])
LOG_PROBS = torch.log(torch.tensor([[2.0, 1.0, 0.5], [2.0, 9.0, 9.0]]))
ADVANTAGES = torch.tensor([[1.0, 1.0, -1.0], [-1.0, 1.0, 1.0]])


def test_the_update_by_hand() -> None:
    got = policy_update(LOG_PROBS, torch.zeros(2, 3), ADVANTAGES, MASK, clip_low=0.2, clip_high=0.2)
    assert got["clip_fraction_high"].value() == 0.25  # ratio 2, A > 0; the other ratio of 2 has A < 0
    assert got["clip_fraction_low"].value() == 0.25
    assert got["ratio_max"].value() == pytest.approx(2.0)
    log2 = math.log(2)
    assert got["approx_kl"].value() == pytest.approx((2 * (1 - log2) + 0 + (log2 - 0.5)) / 4)


def test_without_bounds_there_is_no_clip_fraction() -> None:
    assert set(policy_update(LOG_PROBS, LOG_PROBS, ADVANTAGES, MASK)) == {"approx_kl", "ratio_max"}


def test_on_policy_nothing_has_moved() -> None:
    got = policy_update(LOG_PROBS, LOG_PROBS, ADVANTAGES, MASK)
    assert got["approx_kl"].value() == 0
    assert got["ratio_max"].value() == 1


def test_parts_merge_to_the_whole() -> None:
    def measure(rows: slice) -> dict:
        return policy_update(
            LOG_PROBS[rows], torch.zeros(2, 3)[rows], ADVANTAGES[rows], MASK[rows], clip_low=0.2, clip_high=0.2
        )

    whole, parts = measure(slice(0, 2)), (measure(slice(0, 1)), measure(slice(1, 2)))
    for name, metric in whole.items():
        assert parts[0][name].merge(parts[1][name]).value() == pytest.approx(metric.value().item())


def test_a_mismatch_is_seen_at_its_largest_token() -> None:
    rollout = LOG_PROBS.clone()
    rollout[0, 1] += 0.5
    rollout[1, 2] += 99.0
    got = sampler_mismatch(LOG_PROBS, rollout, MASK)
    assert got["mismatch_max"].value() == pytest.approx(0.5)
    assert got["mismatch_k3"].value() == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 4)


def test_responses() -> None:
    got = responses(torch.tensor([1.0, 0.0]), MASK)
    assert got["score"].value() == 0.5
    assert got["length"].value() == 2


@pytest.mark.parametrize(("values", "want"), [([1.0, 3.0], 1.0), ([2.0, 2.0], 0.0), ([3.0, 1.0], -3.0)])
def test_explained_variance(values: list[float], want: float) -> None:
    full = torch.ones(1, 2, dtype=torch.bool)
    assert explained_variance(torch.tensor([values]), torch.tensor([[1.0, 3.0]]), full) == pytest.approx(want)


def test_a_constant_return_explains_nothing() -> None:
    full = torch.ones(1, 2, dtype=torch.bool)
    assert explained_variance(torch.tensor([[1.0, 3.0]]), torch.full((1, 2), 5.0), full) == 0


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_metrics_of_nothing_are_zero_and_never_raise(shape: tuple[int, int]) -> None:
    x, mask = torch.full(shape, torch.nan), torch.zeros(shape, dtype=torch.bool)
    metrics = {
        **policy_update(x, x, x, mask, clip_low=0.2, clip_high=0.2),
        **sampler_mismatch(x, x, mask),
        **responses(torch.zeros(shape[0]), mask),
        "mean": token_mean(x, mask),
    }
    assert {name: metric.value().item() for name, metric in metrics.items()} == dict.fromkeys(metrics, 0.0)
    assert explained_variance(x, x, mask) == 0


def test_metrics_carry_no_graph() -> None:
    x = LOG_PROBS.clone().requires_grad_()
    for metric in policy_update(x, LOG_PROBS, ADVANTAGES, MASK).values():
        assert not metric.value().requires_grad
    assert not token_mean(x, MASK).value().requires_grad
