"""Muon for the matrices, and learning rates by name, in one process."""

import pytest
import torch

from rlprims import algorithms
from rlprims.execution import OptimizerConfig
from tests.execution.execution_contract import local, training_batch

ALGORITHM = algorithms.reinforce()


def before_and_after(execution):
    policy = execution.training.policy.module
    start = {name: x.detach().clone() for name, x in policy.named_parameters()}
    batch = training_batch(execution)
    execution.update(batch, ALGORITHM)
    return batch, start, dict(policy.named_parameters())


def test_muon_trains_the_matrices_and_adamw_the_rest(model_path):
    execution = local(model_path, ALGORITHM, optimizer=OptimizerConfig(name="muon", lr=1e-2, weight_decay=0.0))
    state = execution.training.policy
    _, start, now = before_and_after(execution)
    assert len(state.muon.state) == 14, "seven matrices in each of two layers"
    assert not set(state.muon.state) & set(state.optimizer.state)
    names = {id(x): name for name, x in now.items()}
    trained = {names[id(x)] for x in state.muon.state}
    assert all("layers" in name and "proj" in name for name in trained)
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}.isdisjoint(trained)
    for name in trained:
        step = now[name].detach() - start[name]
        # an orthogonal matrix times 0.2 sqrt(its larger side): less where the gradient has a lower rank
        assert 3e-4 < float(step.square().mean().sqrt()) < 2.5e-3, name


def test_a_step_of_muon_is_torchs(model_path):
    execution = local(model_path, ALGORITHM, optimizer=OptimizerConfig(name="muon", lr=1e-2, max_grad_norm=1e9))
    other = local(model_path, ALGORITHM)
    twin = dict(other.training.policy.module.named_parameters())
    batch, start, now = before_and_after(execution)
    other.training.policy.step = lambda: (0.0, 0.0, False)  # leave the gradients where they are
    other.update(batch, ALGORITHM)
    name = "model.layers.0.mlp.up_proj.weight"
    with torch.no_grad():
        twin[name].copy_(start[name])
    torch.optim.Muon([twin[name]], lr=1e-2, weight_decay=0.01, adjust_lr_fn="match_rms_adamw").step()
    torch.testing.assert_close(now[name], twin[name])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_rate_of_its_own(model_path, name, tmp_path):
    config = OptimizerConfig(name=name, lr=1e-2, lr_of={"embed_tokens": 0.0, "layers.0": 1e-3}, weight_decay=0.0)
    execution = local(model_path, ALGORITHM, optimizer=config)
    batch, start, now = before_and_after(execution)
    moved = {name: float((now[name] - start[name]).detach().abs().max()) for name in now}
    assert moved["model.embed_tokens.weight"] == 0
    assert 0 < moved["model.layers.0.mlp.up_proj.weight"] < moved["model.layers.1.mlp.up_proj.weight"] / 3

    (tmp_path / "saved").mkdir()
    execution.save(tmp_path / "saved")
    again = local(model_path, ALGORITHM, optimizer=config)
    again.load(tmp_path / "saved")
    for each in (execution, again):
        each.update(batch, ALGORITHM)
    assert torch.equal(again.log_probs(batch), execution.log_probs(batch))
