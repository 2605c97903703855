"""The contract of ``save`` and ``load``: the next update is the one that would have been."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlprims import algorithms
from rlprims.execution import Models, OptimizerConfig, UpdateReport
from tests import tiny
from tests.execution.execution_contract import identical, plain_logits, prompts, save, saved, training_batch, weights

PPO = algorithms.ppo()
OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=2, schedule="cosine")


@pytest.fixture(scope="module")
def batch(execution):
    return training_batch(execution)


def updates(execution, batch, count):
    return [(execution.update_critic(batch, PPO), execution.update(batch, PPO)) for _ in range(count)]


class Interrupted(NamedTuple):
    """A run saved after two updates, what it did next, and another execution of its kind."""

    execution: Models
    directory: Path
    reports: list[tuple[UpdateReport, UpdateReport]]
    after: list[Path]
    """A save after each of the reports."""
    other: Models


@pytest.fixture(scope="module", params=["untied", "tied", "mixture"])
def interrupted(request, build, batch, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    if request.param == "mixture":  # whose experts transformers stores one by one
        tiny.save_mixture(path, seed=3)
    else:
        tiny.save_model(path, seed=3, tie_word_embeddings=request.param == "tied")
    execution, other = (build.func(path, PPO, optimizer=OPTIMIZER, updates=6) for _ in range(2))
    directory, *after = (tmp_path_factory.mktemp("checkpoint") for _ in range(3))
    updates(execution, batch, 2)
    execution.sync_weights()
    save(execution, directory)
    reports = []
    for folder in after:
        reports += updates(execution, batch, 1)
        save(execution, folder)
    return Interrupted(execution, directory, reports, after, other)


def test_the_next_updates_are_bitwise_the_same(interrupted, batch, tmp_path):
    resumed = interrupted.other
    resumed.load(interrupted.directory)
    again = updates(resumed, batch, 2)
    assert [(a.loss, a.grad_norm, a.lr) for pair in again for a in pair] == [
        (r.loss, r.grad_norm, r.lr) for pair in interrupted.reports for r in pair
    ]
    for model in ("policy", "critic"):
        assert identical(weights(resumed, tmp_path / model, model), saved(interrupted.after[-1], model))


def test_a_load_undoes_what_came_before_it(interrupted, batch, tmp_path):
    updates(interrupted.other, batch, 3)
    for name, used in (("same", interrupted.execution), ("other", interrupted.other)):
        used.load(interrupted.directory)
        updates(used, batch, 1)
        assert identical(weights(used, tmp_path / name), saved(interrupted.after[0]))


def test_the_sampler_has_the_loaded_weights(interrupted, batch):
    resumed = interrupted.other
    updates(resumed, batch, 1)
    resumed.sync_weights()
    resumed.load(interrupted.directory)
    assert resumed.weights_version == 2
    resumed.sync_weights()
    sampled = training_batch(resumed)
    assert (sampled["weights_version"] == 3).all()
    torch.testing.assert_close(sampled["rollout_log_probs"], resumed.log_probs(sampled), rtol=1e-5, atol=1e-5)


def test_the_policy_is_a_hugging_face_model(interrupted, batch):
    resumed, directory = interrupted.other, interrupted.directory
    resumed.load(directory)
    ours = resumed.log_probs(batch)
    model = AutoModelForCausalLM.from_pretrained(directory / "policy", dtype=torch.float32).eval()
    with torch.no_grad():
        log_probs = plain_logits(model, batch, 0).log_softmax(-1)
    tokens = batch["responses"][0, : len(log_probs)]
    torch.testing.assert_close(ours[0, : len(tokens)], log_probs.gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(directory / "policy")
    assert tokenizer("12+3=").input_ids == list(prompts(["12+3="])["prompt_ids"][0])
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (tiny.PAD_ID, tiny.EOS_ID)


def test_before_the_first_update_too(fresh, batch, tmp_path):
    execution = fresh(PPO)
    weights(execution, tmp_path / "start")
    updates(execution, batch, 1)
    first = weights(execution, tmp_path / "1")
    execution.load(tmp_path / "start")
    updates(execution, batch, 1)
    assert identical(first, weights(execution, tmp_path / "2"))


def test_after_a_step_that_updated_nothing(fresh, batch, tmp_path):
    """As a critic's warm-up: measured, sent to the sampler again, and saved."""
    execution = fresh(algorithms.reinforce())
    before = weights(execution, tmp_path / "before")
    for _ in range(2):
        execution.log_probs(batch)
        execution.sync_weights()
    assert identical(weights(execution, tmp_path / "after"), before)


def test_another_models_checkpoint_is_refused(build, fresh, tmp_path):
    other = tiny.save_model(tmp_path / "other", num_hidden_layers=1)
    weights(build.func(other, algorithms.reinforce()), tmp_path / "save")
    with pytest.raises(ValueError, match="does not fit the model: lacks"):
        fresh(algorithms.reinforce()).load(tmp_path / "save")
