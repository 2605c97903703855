"""Right steps of twenty kinds of runs have no finding, except the note that old weights differ, which is true."""

import pytest
import torch

from rlprims import audit
from tests.audit.steps import SETUPS, Setup, make, named

AGED = {"L3"}


def assert_clean(setup: Setup, seed: int) -> None:
    data, _ = make(setup, seed)
    checked = audit.check(named(data, setup))
    assert not [each for each in checked.findings if each.severity == "error"]
    assert set(checked.codes) <= (AGED if "ages" in setup else set()), str(checked)
    assert not [reason for reason in checked.silent.values() if "size of tensor" in reason]


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: f"{setup.preset} {setup.options}")
def test_a_right_step_is_clean(setup: Setup) -> None:
    for seed in range(1 if {"gradients", "losses"} & set(setup.options.split()) else 3):
        assert_clean(setup, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(100, 104), pytest.param(range(104, 125), marks=pytest.mark.release)], ids=str)
@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: f"{setup.preset} {setup.options}")
def test_five_hundred_right_steps_are_clean(setup: Setup, seeds: range) -> None:
    for seed in seeds:
        assert_clean(setup, seed)


@pytest.mark.slow
def test_the_steps_have_what_the_checks_need() -> None:
    """No check is silent in all setups, but those of columns that a healthy run may lack."""
    silent = [set(audit.check(named(make(setup, 0)[0], setup)).silent) for setup in SETUPS]
    assert set.intersection(*silent) <= {"L12", "K1"}
    assert all("weights_version" in make(setup, 0)[0] for setup in SETUPS if "ages" in setup)


def test_the_tokens_were_drawn_from_the_sampler() -> None:
    """E[exp(trainer - sampler)] = 1 over tokens of the sampler, if its support is the trainer's."""
    data, _ = make(Setup("grpo", "ages", 64, 8), 0)
    drawn = data["response_mask"] & (data["responses"] != 2)
    d = (data["old_log_probs"] - data["rollout_log_probs"])[drawn].double()
    assert abs(float(d.exp().mean()) - 1) < 4 * float(d.exp().std()) / len(d) ** 0.5
    assert torch.equal(data["rollout_log_probs"] == 0, ~data["response_mask"])
