"""Packing: the numbers of the padded forward pass, each prompt once, and the models that are refused."""

import pytest
import torch
from execution_contract import OPTIMIZER, local, training_batch, weights
from execution_families import VOCABULARY, assert_same_gradients, build, gradients, ragged_batch

from rlprims import algorithms
from rlprims.execution import ModelConfig
from rlprims.execution.hf._forward import _before_responses
from rlprims.execution.hf._packed import PACKED_MODELS, layout, packed_micro_batches, use_packing
from tests import tiny

WINDOWS = {
    "a window of 3": ("mistral", {"sliding_window": 3}),
    "windows in some layers": ("gemma3_text", {"sliding_window": 3, "num_hidden_layers": 6}),
    "a window of 3 and fused projections": ("phi3", {"sliding_window": 3}),
}
MODELS = {**{kind: (kind, {}) for kind in PACKED_MODELS}, **WINDOWS}


def test_the_tokens_that_are_read():
    """By hand: [5 6] once for two rows, [7 5 6] once for two, [9]; of the responses 4, 0, 2, 3 and 0 tokens."""
    where = layout(ragged_batch())
    assert len(where.predicting) == 5 + 1 + 3 + 4
    assert sorted(where.input_ids[0, :6].tolist()) == [5, 5, 6, 6, 7, 9]
    assert where.input_ids[0, 6:].tolist() == [3, 4, 5, 6, 6, 7, 4, 5, 6]
    assert where.position_ids[0, 6:].tolist() == [2, 3, 4, 5, 3, 4, 1, 2, 3]
    assert where.blocks == [(2, 6), (2, 4), (1, 2)]  # of 6, 5, 4, 3 and 2 tokens


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_the_padded_forward(name):
    kind, changes = MODELS[name]
    model, batch = build(kind, **changes), ragged_batch()
    slope = torch.randn(13, VOCABULARY, generator=torch.Generator().manual_seed(0)).double()

    def logits_and_gradients(packing):
        logits, attended = _before_responses(model, batch, packing=packing, hidden=False)
        assert torch.equal(attended, batch["attention_mask"][:, 3:])
        return logits.detach(), gradients((logits * slope).sum(), model)

    padded, of_padded = logits_and_gradients(packing=False)
    use_packing(model)
    packed, of_packed = logits_and_gradients(packing=True)
    torch.testing.assert_close(packed, padded, rtol=0, atol=1e-6)  # norms and rotary embeddings are float32
    assert_same_gradients(of_packed, of_padded)
    again, _ = logits_and_gradients(packing=False)  # padded batches, as the sampler has, are attended to as before
    torch.testing.assert_close(again, padded, rtol=0, atol=0)


@pytest.mark.parametrize("kind", WINDOWS)
def test_the_windows_of_these_tests_matter(kind):
    model_type, changes = WINDOWS[kind]
    narrow, wide = build(model_type, **changes), build(model_type, **changes | {"sliding_window": 64})
    one, other = (_before_responses(model, ragged_batch(), packing=False, hidden=False)[0] for model in (narrow, wide))
    assert (one - other).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gemma2", "its attention has a soft cap"),
        ("stablelm", "tested types are"),  # it says that it passes unknown arguments on to attention, and does not
    ],
)
def test_other_models_are_refused_when_they_are_loaded(kind, reason):
    model = build(kind)
    with pytest.raises(
        ValueError, match=rf"model.packing: a {kind} cannot be packed: {reason}.*Set model.packing: false"
    ):
        use_packing(model)
    assert model.config._attn_implementation == "sdpa"


def test_other_attention_is_refused_by_the_config():
    with pytest.raises(ValueError, match=r"packing: expected attention: sdpa, got eager\. Set packing: false"):
        ModelConfig(path="model", attention="eager")
    assert not ModelConfig(path="model", attention="eager", packing=False).packing


def test_a_saved_model_does_not_name_our_attention(model_path, tmp_path):
    weights(local(model_path, algorithms.reinforce()), tmp_path / "save")
    assert "rlprims" not in (tmp_path / "save" / "policy" / "config.json").read_text().replace(str(tmp_path), "")


@pytest.mark.parametrize("tokens", [None, 100])
def test_an_update_is_the_padded_one(model_path, tmp_path, tokens):
    algorithm = algorithms.grpo()
    packed, padded = (
        local(model_path, algorithm, max_tokens_per_micro_batch=tokens, packing=packing) for packing in (True, False)
    )
    batch = training_batch(packed)
    torch.testing.assert_close(packed.log_probs(batch), padded.log_probs(batch), rtol=1e-6, atol=5e-6)
    torch.testing.assert_close(packed.entropies(batch), padded.entropies(batch), rtol=1e-6, atol=5e-6)
    one, other = (execution.update(batch, algorithm) for execution in (packed, padded))
    assert one.loss == pytest.approx(other.loss, rel=1e-6, abs=1e-7)
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)
    after = weights(packed, tmp_path / "packed"), weights(padded, tmp_path / "padded")
    for name, value in after[1].items():
        torch.testing.assert_close(after[0][name], value, rtol=1e-5, atol=1e-5 * OPTIMIZER.lr * 10)


def test_a_prompt_is_read_once_for_all_its_responses(model_path):
    """Of 8 rows with one prompt of 4 tokens the model reads 4 tokens, and of each response all but the last."""
    execution, shapes = local(model_path, algorithms.reinforce()), []
    batch = training_batch(execution).select_idxs([0] * 8)
    module = execution.training.policy.module
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    execution.log_probs(batch)
    hook.remove()
    prompt, response = len(tiny.tokenizer().encode("1+2=")), int(batch["response_mask"][0].sum())
    assert shapes == [(1, prompt + 8 * (response - 1))]


def test_micro_batches_count_a_shared_prompt_once():
    prompts, shared, own = [0, 0, 0, 1, 1], [4, 4, 4, 2, 2], [3, 1, 2, 1, 9]
    assert packed_micro_batches(prompts, shared, own, max_tokens=100) == [[0, 1, 2, 3, 4]]
    assert packed_micro_batches(prompts, shared, own, max_tokens=11) == [[0, 1, 2], [3], [4]]
    assert packed_micro_batches(prompts, shared, own, max_tokens=13) == [[0, 1, 2, 3], [4]]
    assert packed_micro_batches([], [], [], max_tokens=1) == []
    with pytest.raises(ValueError, match="row 4 has 11 tokens, more than max_tokens=10"):
        packed_micro_batches(prompts, shared, own, max_tokens=10)
