"""Attention of one new token: heads that share keys are the queries of one, and it says what the model's own says."""

import pytest
import torch
from execution_contract import local, prompts
from test_execution_packed import SMALL
from transformers import Cache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.integrations import sdpa_attention

from rlprims import algorithms
from rlprims.execution import Sampling
from rlprims.execution.hf import _decoding
from rlprims.execution.hf._cache import RoomyLayer
from rlprims.execution.hf._decoding import decoding
from rlprims.execution.hf._models import response_logits
from rlprims.execution.hf._packed import pack_if_equal

HEADS = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
MODELS = {
    "shared by two": lambda: LlamaForCausalLM(LlamaConfig(**HEADS)),
    "each its own": lambda: LlamaForCausalLM(LlamaConfig(**HEADS | {"num_key_value_heads": 4})),
    "a window of 3": lambda: MistralForCausalLM(MistralConfig(**HEADS, sliding_window=3)),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_it_says_what_the_model_says(name, padded):
    torch.manual_seed(0)
    model = MODELS[name]().eval().double()
    pack_if_equal(model, response_logits)
    ids = torch.randint(3, 32, (3, 9))
    attention = torch.ones(3, 9, dtype=torch.int64)
    if padded:
        attention[0, :2] = attention[2, :1] = 0
    positions = (attention.cumsum(-1) - 1).clamp(min=0)

    @torch.no_grad()
    def token_by_token():
        cache, found = Cache(layer_class_to_replicate=RoomyLayer), []
        for begin, end in [(0, 4), *((t, t + 1) for t in range(4, 9))]:
            output = model(
                input_ids=ids[:, begin:end],
                attention_mask=attention[:, :end] if padded else None,
                position_ids=positions[:, begin:end],
                past_key_values=cache,
                use_cache=True,
            )
            found.append(output.logits[:, -1])
        return torch.stack(found)

    own = token_by_token()
    with decoding(model):
        ours = token_by_token()
    torch.testing.assert_close(ours, own, rtol=0, atol=1e-6)  # norms and rotary embeddings are float32


def test_no_key_is_copied_for_a_head(model_path, monkeypatch):
    """With prompts of two lengths, whose padding makes Hugging Face's own copy the cache at each token."""
    execution = local(model_path, algorithms.reinforce())
    repeated, asked = [], []
    repeat, attend = sdpa_attention.repeat_kv, _decoding.scaled_dot_product_attention
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda x, n: repeated.append(x.shape[2]) or repeat(x, n))
    monkeypatch.setattr(
        _decoding,
        "scaled_dot_product_attention",
        lambda q, k, v, **rest: asked.append((q.shape[2], rest["attn_mask"] is not None)) or attend(q, k, v, **rest),
    )
    rows = prompts(["1+2=", "17-3="] * 8)
    execution.generate(rows, Sampling(max_new_tokens=6), seed=0, prompt_width=5)
    config = execution.training.policy.module.config
    assert config.num_attention_heads > config.num_key_value_heads
    assert {queries for queries, _ in asked} == {config.num_attention_heads // config.num_key_value_heads}
    assert any(masked for _, masked in asked)
    assert set(repeated) <= {5}  # the prompts', once
    assert config._attn_implementation == "sdpa"
