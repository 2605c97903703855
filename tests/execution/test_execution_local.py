"""Of the local implementation alone: models that cannot be used, and the learning rate."""

import subprocess
import sys

import pytest
import torch
from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel

from rlprims import algorithms
from rlprims.execution import ModelConfig, OptimizerConfig
from rlprims.execution.hf._train_state import learning_rate
from rlprims.execution.local import LocalExecution
from tests import tiny
from tests.execution.execution_contract import local, prompts, training_batch, weights, with_columns

SMALL = {"vocab_size": 32, "max_position_embeddings": 64}


def build_from(path):
    return local(path, algorithms.reinforce())


class TestModelsThatCannotBeUsed:
    def test_saved_without_its_head(self, tmp_path):
        tiny.causal_lm().model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=rf"{tmp_path}.*lm_head"):
            build_from(tmp_path)

    def test_an_encoder_that_has_no_causal_form(self, tmp_path):
        DistilBertModel(DistilBertConfig(dim=32, hidden_dim=32, n_layers=1, n_heads=2, **SMALL)).save_pretrained(
            tmp_path
        )
        with pytest.raises(ValueError, match=rf"cannot load '{tmp_path}' as AutoModelForCausalLM"):
            build_from(tmp_path)

    def test_an_encoder_that_has_one_but_not_its_weights(self, tmp_path):
        settings = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        BertModel(BertConfig(**settings, **SMALL)).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=str(tmp_path)):
            build_from(tmp_path)

    @pytest.mark.parametrize("name", ["missing", "empty", "file"])
    def test_nothing_there(self, tmp_path, name):
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").write_text("{}")
        with pytest.raises(ValueError, match=rf"cannot load '{tmp_path / name}'"):
            build_from(tmp_path / name)

    @pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"{" * 99])
    def test_damaged_weights(self, tmp_path, damage):
        file = tiny.save_model(tmp_path) / "model.safetensors"
        file.write_bytes(damage(file.read_bytes()))
        with pytest.raises(ValueError, match=rf"cannot load '{tmp_path}'"):
            build_from(tmp_path)

    def test_no_end_of_sequence(self, tmp_path):
        path = tiny.save_model(tmp_path, eos_token_id=None)
        tokenizer = tiny.tokenizer()
        tokenizer.eos_token = None
        with pytest.raises(ValueError, match="no end-of-sequence token"):
            LocalExecution(
                ModelConfig(path=str(path)),
                OptimizerConfig(),
                algorithm=algorithms.reinforce(),
                tokenizer=tokenizer,
                temperature=1.0,
                updates=1,
            )


def test_a_head_that_is_the_embedding_need_not_be_stored(tmp_path):
    tiny.causal_lm(tie_word_embeddings=True).model.save_pretrained(tmp_path)
    assert training_batch(build_from(tmp_path))["responses"].shape[0] == len(prompts())


def test_the_reference_may_be_another_model(model_path, tmp_path):
    other = tiny.save_model(tmp_path, seed=7)
    execution = local(model_path, algorithms.grpo(), reference=str(other))
    batch = training_batch(execution)
    expected = local(other, algorithms.reinforce()).log_probs(batch)
    assert torch.equal(execution.log_probs(batch, reference=True), expected)


def test_a_critic_that_was_trained_goes_on_with_its_head(model_path, tmp_path):
    ppo = algorithms.ppo()
    first = local(model_path, ppo)
    batch = training_batch(first)
    first.update_critic(with_columns(batch, returns=torch.ones(batch["responses"].shape)), ppo)
    weights(first, tmp_path / "save")
    second = local(model_path, ppo, critic=str(tmp_path / "save" / "critic"))
    assert torch.equal(second.values(batch), first.values(batch))
    assert (second.values(batch) != 0).any()


WARM = {"lr": 1.0, "warmup_steps": 4}


@pytest.mark.parametrize(
    ("settings", "updates", "rates"),
    [
        ({"lr": 1.0}, 3, [1.0, 1.0, 1.0, 1.0]),
        (WARM, 6, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
        ({"lr": 2.0, "schedule": "linear"}, 5, [2.0, 1.5, 1.0, 0.5, 0.0, 0.0]),
        ({"lr": 1.0, "schedule": "linear", "final_lr_ratio": 0.2}, 5, [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ({"lr": 1.0, "schedule": "cosine"}, 5, [1.0, 0.85355, 0.5, 0.14645, 0.0, 0.0]),
        ({"lr": 1.0, "schedule": "cosine", "final_lr_ratio": 0.5}, 3, [1.0, 0.75, 0.5, 0.5]),
        ({**WARM, "schedule": "linear"}, 7, [0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.0, 0.0]),
        ({**WARM, "schedule": "cosine"}, 2, [0.25, 0.5, 0.75, 1.0]),
        ({"lr": 1.0, "schedule": "linear"}, 1, [1.0, 0.0]),
    ],
)
def test_learning_rate(settings, updates, rates):
    config = OptimizerConfig(**settings)
    assert [learning_rate(config, i, updates) for i in range(len(rates))] == pytest.approx(rates, abs=1e-5)


@pytest.mark.slow
def test_the_memory_of_the_parent_process_is_not_counted(tmp_path):
    """Linux hands a process's largest size on to the program that it starts."""
    small = "from rlprims.execution._observed import _peak_memory; print(_peak_memory())"
    large = f"""
import subprocess, sys
held = b"x" * (2 << 30)
print(subprocess.run([sys.executable, "-c", {small!r}], check=True, capture_output=True, text=True).stdout)
"""
    done = subprocess.run([sys.executable, "-c", large], check=True, capture_output=True, text=True)
    assert 50e6 < int(done.stdout) < 1.5e9
