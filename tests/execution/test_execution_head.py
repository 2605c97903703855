"""The head apart from the model: the same update as with logits that are whole, and the heads that stay."""

import pytest
import torch
from execution_contract import local, training_batch
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, PhiConfig, PhiForCausalLM

from rlprims import algorithms, losses
from rlprims.algorithms import LossTerm, use
from rlprims.execution.hf import _head
from rlprims.execution.hf._head import head_of, headless, part_head_if_equal
from rlprims.execution.hf._models import response_logits
from rlprims.execution.hf._objective import is_token_wise, token_weights
from rlprims.execution.hf._packed import probe

GRPO = algorithms.grpo()
ALGORITHMS = {
    "grpo": GRPO,
    "the KL where a group was solved": GRPO.replace(
        loss_terms=[LossTerm(coefficient=0.1, loss=use(losses.kl), tokens=use(algorithms.solved))]
    ),
    "a mean per prompt": algorithms.dapo(max_length=24, buffer_length=4).replace(
        aggregation=losses.prompt_token_mean, score_shaping=[]
    ),
    "gspo": algorithms.gspo(),
    "entropy": GRPO.replace(loss_terms=[LossTerm(coefficient=0.1, loss=use(losses.entropy))]),
}
NOT_TOKEN_WISE = ("gspo", "entropy")


@pytest.fixture
def apart(monkeypatch):
    monkeypatch.setattr(_head, "LEAST_VOCABULARY", 0)
    monkeypatch.setattr(_head, "LARGE_VOCABULARY", 0)


def batch_of(execution, algorithm):
    batch = training_batch(execution)
    batch["ref_log_probs"] = batch["old_log_probs"] - 0.1
    batch["scores"] = torch.arange(len(batch)) % 2.0
    weighed = algorithms.weigh_tokens(algorithm, {**batch.batch, "log_probs": batch["old_log_probs"]})
    for name, tensor in weighed.items():
        batch[name] = tensor
    return batch


@pytest.mark.parametrize("name", ALGORITHMS)
def test_updates_are_those_of_whole_logits(model_path, apart, name):
    algorithm = ALGORITHMS[name]
    tiled, whole = (local(model_path, algorithm, fused_head=how) for how in ("auto", "never"))
    assert head_of(tiled.training.policy.module) is not None
    assert head_of(whole.training.policy.module) is None
    batch = batch_of(whole, algorithm)
    assert is_token_wise(algorithm, dict(batch.batch.items())) is (name not in NOT_TOKEN_WISE)
    for verb in ("log_probs", "entropies"):
        one, other = (getattr(execution, verb)(batch) for execution in (tiled, whole))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for _ in range(3):
        one, other = (execution.update(batch, algorithm) for execution in (tiled, whole))
        assert one.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        values = [{name: float(metric.value()) for name, metric in r.metrics.items()} for r in (one, other)]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-5)


SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def test_a_soft_cap_goes_with_the_head(apart):
    model = Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=2.0)).eval()
    part_head_if_equal(model, response_logits)
    head, batch = head_of(model), probe(model)
    assert head is not None
    with headless(model):
        states = response_logits(model, batch)
    logits = response_logits(model, batch)
    torch.testing.assert_close(torch.tanh(states @ head.weight.T / 2) * 2, logits, rtol=1e-5, atol=1e-5)
    assert logits.abs().max() > 1


def test_a_scale_behind_the_head_goes_with_the_states(apart):
    model = CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.5)).eval()
    part_head_if_equal(model, response_logits)
    assert head_of(model) is not None


def with_another_end():
    model = Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=16))
    model.lm_head.register_forward_hook(lambda module, inputs, output: output.clamp(max=0.0))
    return model


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: PhiForCausalLM(PhiConfig(**SMALL)), id="a bias"),
        pytest.param(with_another_end, id="something behind it"),
        pytest.param(lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=16)).bfloat16(), id="16 bits on a CPU"),
    ],
)
def test_heads_that_stay(apart, model):
    built = model().eval()
    part_head_if_equal(built, response_logits)
    assert head_of(built) is None


def test_a_small_vocabulary_stays(model_path):
    assert head_of(local(model_path, GRPO).training.policy.module) is None


def of_the_sum(log_probs, response_mask):
    """Asks for no ``cu_seqlens``, and is of whole rows."""
    return torch.where(response_mask, log_probs, 0.0).sum(-1, keepdim=True).expand_as(log_probs)


def largest(losses, response_mask):
    return torch.where(response_mask, losses, -torch.inf).max()


def test_users_functions_are_tried():
    data = {
        "response_mask": torch.ones(2, 3, dtype=torch.bool),
        "advantages": torch.ones(2, 3),
        "old_log_probs": torch.zeros(2, 3),
    }
    plain = algorithms.reinforce()
    assert is_token_wise(plain, data)
    assert not is_token_wise(plain.replace(policy_loss=of_the_sum), data)
    mean = plain.replace(aggregation=losses.token_mean)
    torch.testing.assert_close(token_weights(mean, data), torch.full((2, 3), 1 / 6))
    assert token_weights(plain.replace(aggregation=largest), data) is None
