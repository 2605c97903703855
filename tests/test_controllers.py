"""Coefficients of the KL penalty."""

import pytest

from rlprims.controllers import AdaptiveKL, FixedKL


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
