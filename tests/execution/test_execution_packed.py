"""The forward without padding: the numbers of the padded one, each prompt once, and the models that cannot."""

import pytest
import torch
from execution_contract import OPTIMIZER, local, training_batch, weights
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from rlprims import algorithms
from rlprims.execution.hf._models import response_logits
from rlprims.execution.hf._packed import (
    layout,
    micro_batches_of_groups,
    pack_if_equal,
    packed_logits,
    packing,
    packs,
)
from tests import tiny

SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GPT2 = {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": None, "eos_token_id": None}
MODELS = {
    "qwen2": tiny.causal_lm,
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "a window of 3": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=3)),
}


def part():
    """Prompts of 2, 3, 3, 1 and 2 tokens, the first and the last the same, and ragged responses, one of none."""
    prompts = torch.tensor([[0, 5, 6], [7, 5, 6], [7, 5, 6], [0, 0, 9], [31, 5, 6]])
    responses = torch.arange(25).reshape(5, 5) % 7 + 3
    there = torch.tensor([2, 3, 3, 1, 2])[:, None] > torch.arange(2, -1, -1)
    lengths = torch.tensor([5, 1, 3, 4, 0])
    return {
        "prompts": prompts,
        "responses": responses,
        "attention_mask": torch.cat([there, torch.arange(5) < lengths[:, None]], 1),
    }


def test_the_tokens_that_are_read():
    """By hand: [5 6] once for two rows, [7 5 6] once for two, [9]; of the responses 4, 0, 2, 3 and 0 tokens."""
    where = layout(part())
    assert len(where.predicting) == 5 + 1 + 3 + 4
    assert sorted(where.input_ids[0, :6].tolist()) == [5, 5, 6, 6, 7, 9]
    assert where.input_ids[0, 6:].tolist() == [3, 4, 5, 6, 6, 7, 4, 5, 6]
    assert where.position_ids[0, 6:].tolist() == [2, 3, 4, 5, 3, 4, 1, 2, 3]
    assert where.blocks == [(2, 6), (2, 4), (1, 2)]  # of 6, 5, 4, 3 and 2 tokens


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_the_padded_forward(name):
    torch.manual_seed(0)
    model, batch = MODELS[name]().eval().double(), part()
    pack_if_equal(model, response_logits)
    assert packs(model)
    where = layout(batch)
    slope = torch.randn(len(where.predicting), 32).double()

    def with_gradients(logits):
        names, parameters = zip(*model.named_parameters(), strict=True)
        return logits.detach(), dict(zip(names, torch.autograd.grad((logits * slope).sum(), parameters), strict=True))

    with packing(model):
        packed, of_packed = with_gradients(packed_logits(model, where))
    padded, of_padded = with_gradients(response_logits(model, batch)[where.attended])
    torch.testing.assert_close(packed, padded, rtol=0, atol=1e-6)  # norms and rotary embeddings are float32
    largest = max(float(gradient.abs().max()) for gradient in of_padded.values())
    for parameter, gradient in of_padded.items():
        torch.testing.assert_close(of_packed[parameter], gradient, rtol=0, atol=1e-6 * largest)


def test_a_model_that_would_say_something_else_stays_padded():
    """Gemma 2 caps its attention's logits, which the packed attention does not know."""
    model = Gemma2ForCausalLM(Gemma2Config(**SMALL)).eval()
    pack_if_equal(model, response_logits)
    assert not packs(model)


@pytest.mark.parametrize("tokens", [None, 100])
def test_an_update_is_the_padded_one(model_path, tmp_path, tokens):
    algorithm = algorithms.grpo()
    packed, padded = (local(model_path, algorithm, max_tokens_per_micro_batch=tokens) for _ in range(2))
    padded.training.policy.module.packs = padded.training.reference.packs = False
    assert packs(packed.training.policy.module)
    batch = training_batch(packed)
    torch.testing.assert_close(packed.log_probs(batch), padded.log_probs(batch), rtol=1e-6, atol=5e-6)
    torch.testing.assert_close(packed.entropies(batch), padded.entropies(batch), rtol=1e-6, atol=5e-6)
    one, other = (execution.update(batch, algorithm) for execution in (packed, padded))
    assert one.loss == pytest.approx(other.loss, rel=1e-6, abs=1e-7)
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)
    after = weights(packed, tmp_path / "packed"), weights(padded, tmp_path / "padded")
    for name, value in after[1].items():
        torch.testing.assert_close(after[0][name], value, rtol=1e-5, atol=1e-5 * OPTIMIZER.lr * 10)


def test_micro_batches_count_a_shared_prompt_once():
    prompts, shared, own = [0, 0, 0, 1, 1], [4, 4, 4, 2, 2], [3, 1, 2, 1, 9]
    assert micro_batches_of_groups(prompts, shared, own, max_tokens=100) == [[0, 1, 2, 3, 4]]
    assert micro_batches_of_groups(prompts, shared, own, max_tokens=11) == [[0, 1, 2], [3], [4]]
    assert micro_batches_of_groups(prompts, shared, own, max_tokens=13) == [[0, 1, 2, 3], [4]]
    assert micro_batches_of_groups([], [], [], max_tokens=1) == []
    with pytest.raises(ValueError, match="row 4 has 11 tokens, more than max_tokens=10"):
        micro_batches_of_groups(prompts, shared, own, max_tokens=10)
