"""``examples/torchrl_loss.py``, as far as it goes without torchrl; tests/peers has the real one."""

import sys

import pytest

from examples.torchrl_loss import grpo_loss
from rlprims import algorithms, losses


class Base:
    pass


@pytest.mark.parametrize("preset", ["dapo", "gspo", "cispo", "dppo", "grpo", "kl_cov", "rloo", "ppo"])
def test_an_algorithm_whose_loss_reads_no_groups_goes(preset):
    algorithm = algorithms.PRESETS[preset]()
    made = grpo_loss(algorithm.replace(aggregation=losses.token_mean), Base)
    assert issubclass(made, Base)
    assert made.algorithm.policy_loss == algorithm.policy_loss


def test_grpo_loss_names_data_that_torchrl_does_not_have():
    with pytest.raises(ValueError, match=r"torchrl does not have group_ids for the loss of gspo"):
        grpo_loss(algorithms.gspo().replace(aggregation=losses.prompt_token_mean), Base)
    with pytest.raises(ValueError, match=r"torchrl does not have observation_mask for the loss of echo"):
        grpo_loss(algorithms.echo(), Base)


def test_torchrl_absent(monkeypatch):
    """Its class is needed only when a loss is made."""
    monkeypatch.setitem(sys.modules, "torchrl.objectives.llm", None)
    with pytest.raises(ImportError, match=r"torchrl"):
        grpo_loss(algorithms.gspo())
