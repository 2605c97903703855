"""Coefficients of the KL penalty and of the entropy bonus."""

import json
import math

import pytest
import torch

from rlprims.controllers import AdaptiveEntropy, AdaptiveKL, Ema, FixedKL


def test_the_adaptive_coefficient_over_three_steps() -> None:
    beta = AdaptiveKL(kl_coef=0.2, target=6.0, horizon=10_000)
    seen = []
    for kl in (5.0, 10.0, 6.0):
        beta.update(kl=kl, samples=256)
        seen.append(beta.value)
    assert seen == pytest.approx([0.199147, 0.200166, 0.200166], abs=5e-7)


@pytest.mark.parametrize(("kl", "error"), [(0.0, -0.2), (1e9, 0.2), (6.0, 0.0), (6.6, 0.1)])
def test_the_error_is_clipped(kl: float, error: float) -> None:
    beta = AdaptiveKL(kl_coef=1.0, target=6.0, horizon=100)
    beta.update(kl=kl, samples=10)
    assert beta.value == pytest.approx(1 + error / 10)


@pytest.mark.parametrize("make", [FixedKL, AdaptiveKL])
def test_a_restored_controller_goes_on_alike(make: type[FixedKL] | type[AdaptiveKL]) -> None:
    first = make(kl_coef=0.3)
    first.update(kl=9.0, samples=64)
    second = make()
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(kl=2.0, samples=64)
    assert first.value == second.value


def test_a_fixed_coefficient_stays() -> None:
    beta = FixedKL(kl_coef=0.05)
    beta.update(kl=100.0, samples=10**6)
    assert beta.value == 0.05


@pytest.mark.parametrize("wrong", [{"target": 0.0}, {"horizon": 0}, {"target": -1.0}])
def test_targets_and_horizons_must_be_positive(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AdaptiveKL(**wrong)


def entropy_values(*entropies: float, **options: float) -> list[float]:
    coefficient = AdaptiveEntropy(**options)
    seen = []
    for entropy in entropies:
        coefficient.update(entropy)
        seen.append(coefficient.value)
    return seen


def test_the_entropy_coefficient_rises_while_entropy_is_short_and_is_applied_only_then() -> None:
    got = entropy_values(0.1, 0.1, 0.5, 0.1, target=0.2, delta=0.01)
    assert got == pytest.approx([0.01, 0.02, 0.0, 0.02])  # in the third step it falls to 0.01, unseen


def test_at_the_target_it_stays_and_is_applied() -> None:
    assert entropy_values(0.2, 0.2, entropy_coef=0.03, target=0.2) == [0.03, 0.03]


def test_adaptive_entropy_stays_within_its_bounds() -> None:
    assert entropy_values(9.0, 9.0, 0.1, delta=0.01) == pytest.approx([0.0, 0.0, 0.01])
    assert entropy_values(0.1, 0.1, 0.1, delta=0.5, max_coef=0.75) == [0.5, 0.75, 0.75]


def test_adaptive_entropy_is_0_before_anything_was_measured() -> None:
    assert AdaptiveEntropy(entropy_coef=0.5).value == 0.0


def test_a_restored_entropy_controller_goes_on_alike() -> None:
    first = AdaptiveEntropy()
    for entropy in (0.1, 0.1, 0.9):
        first.update(entropy)
    second = AdaptiveEntropy(entropy_coef=0.7)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.value == first.value == 0.0
    for controller in (first, second):
        controller.update(0.15)
    assert first.value == second.value == pytest.approx(0.01)


@pytest.mark.parametrize(
    "wrong", [{"target": 0.0}, {"delta": 0.0}, {"entropy_coef": -0.1}, {"entropy_coef": 0.5, "max_coef": 0.1}]
)
def test_an_entropy_controller_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AdaptiveEntropy(**wrong)


@pytest.mark.parametrize("controller", [FixedKL(), AdaptiveKL(), AdaptiveEntropy()])
@pytest.mark.parametrize("state", [{}, {"beta": 1.0}, {"value": math.nan}, {"value": 1.0, "other": 2.0}])
def test_a_state_of_something_else_is_refused(controller, state: dict[str, float]) -> None:
    before = controller.state_dict()
    with pytest.raises(ValueError, match="value"):
        controller.load_state_dict(state)
    assert controller.state_dict() == before


def test_an_average_moves_every_second_update_and_goes_on_after_a_restart() -> None:
    """θ' = 8, θ = 0, rate ¼: 8, 6, 6, 4.5."""
    average, weights = {"w": torch.full((2,), 8.0)}, {"w": torch.zeros(2)}
    ema, seen = Ema(rate=0.25, every=2), []
    for _ in range(4):
        again = Ema(rate=0.25, every=2)
        again.load_state_dict(json.loads(json.dumps(ema.state_dict())))
        again.update(average, weights)
        ema = again
        seen.append(float(average["w"][0]))
    assert seen == [8.0, 6.0, 6.0, 4.5]


def test_rate_one_is_a_copy_and_integers_stay() -> None:
    average, weights = (
        {"w": torch.ones(2), "n": torch.tensor(1)},
        {"w": torch.tensor([2.0, -1.0]), "n": torch.tensor(5)},
    )
    Ema(rate=1.0).update(average, weights)
    assert torch.equal(average["w"], weights["w"])
    assert average["w"] is not weights["w"]
    assert int(average["n"]) == 1


@pytest.mark.parametrize(("rate", "every"), [(0.0, 1), (1.5, 1), (0.5, 0)])
def test_an_average_has_a_rate_and_a_time(rate: float, every: int) -> None:
    with pytest.raises(ValueError, match="expected rate"):
        Ema(rate=rate, every=every)


def test_an_average_is_of_the_same_weights() -> None:
    with pytest.raises(ValueError, match="only one of average and weights has"):
        Ema().update({"a": torch.zeros(1)}, {"b": torch.zeros(1)})
    with pytest.raises(ValueError, match="shape"):
        Ema().update({"a": torch.zeros(1)}, {"a": torch.zeros(2)})
