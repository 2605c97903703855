"""Packing: the numbers of the padded forward pass, what rows share once, and the models that are refused."""

import pytest
import torch

from rlprims import algorithms
from rlprims.batching import prefix_tree
from rlprims.execution import ModelConfig
from rlprims.execution.hf import _micro_batches, _packed
from rlprims.execution.hf._families import PACKED_MODELS
from rlprims.execution.hf._forward import _before_responses
from rlprims.execution.hf._packed import packed_layout, packed_micro_batches, use_packing
from tests import tiny
from tests.execution.execution_contract import OPTIMIZER, local, training_batch, weights
from tests.execution.execution_families import (
    FAMILIES,
    VOCABULARY,
    assert_same_gradients,
    build,
    gradients,
    norms_in_float64,
    ragged_batch,
)

WINDOWS = {
    "a window of 3": ("mistral", {"sliding_window": 3}),
    "windows in some layers": ("gemma3_text", {"sliding_window": 3, "num_hidden_layers": 6}),
    "a window of 3 and fused projections": ("phi3", {"sliding_window": 3}),
}
MODELS = {**{kind: (kind, {}) for kind in FAMILIES if kind in PACKED_MODELS}, **WINDOWS}


def test_the_tokens_that_are_read():
    """By hand: [5 6] and [7 5 6] once for two rows each, and [9]; of the responses 4, 0, 2, 3 and 0 tokens."""
    where = packed_layout(ragged_batch())
    assert len(where.predicting) == 5 + 1 + 3 + 4
    assert where.input_ids.tolist() == [[5, 6, 3, 4, 5, 6, 7, 5, 6, 6, 7, 9, 4, 5, 6]]
    assert where.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0, 1, 2, 3]]
    assert where.predicting.tolist() == [1, 2, 3, 4, 5, 8, 8, 9, 10, 11, 12, 13, 14]
    assert where.blocks == [(2, 6), (2, 4), (1, 2)]  # of 6, 5, 4, 3 and 2 tokens


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_the_padded_forward(name):
    kind, changes = MODELS[name]
    model, batch = build(kind, **changes), ragged_batch()
    slope = torch.randn(13, VOCABULARY, generator=torch.Generator().manual_seed(0)).double()

    def logits_and_gradients(packing):
        logits, with_places = _before_responses(model, batch, packing=packing, hidden=False)
        attended = batch["attention_mask"][:, 3:].flatten()
        assert torch.equal(with_places["answers"], attended.nonzero()[:, 0])
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
        (
            "stablelm",
            "no test packs this type",
        ),  # it says that it passes unknown arguments on to attention, and does not
    ],
)
def test_packing_is_refused_for_untested_models_when_they_are_loaded(kind, reason):
    model = build(kind, **({"attn_logit_softcapping": 50.0} if kind == "gemma2" else {}))
    with pytest.raises(ValueError, match=rf"model.packing: a {kind} is padded: {reason}.*set model.packing: false"):
        use_packing(model)
    assert model.config._attn_implementation == "sdpa"


def test_packing_refuses_other_attention_in_the_config():
    with pytest.raises(ValueError, match=r"packing: expected attention: sdpa, got eager\. Set packing: false"):
        ModelConfig(path="model", attention="eager", packing=True)
    assert not ModelConfig(path="model", attention="eager").packing


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


def shapes_of(execution, batch):
    """Of the tokens that go through the model."""
    shapes, module = [], execution.training.policy.module
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    execution.log_probs(batch)
    hook.remove()
    return shapes


def test_a_prompt_is_read_once_for_all_its_responses(model_path):
    """Of 8 rows with one prompt of 4 tokens the model reads 4 tokens, and of each response all but the last."""
    execution = local(model_path, algorithms.reinforce())
    batch = training_batch(execution).select_idxs([0] * 8)
    responses = batch["responses"].clone()
    responses[:, 0] = torch.arange(8)  # no two go on alike
    batch["responses"] = responses
    prompt, response = len(tiny.tokenizer().encode("1+2=")), int(batch["response_mask"][0].sum())
    assert shapes_of(execution, batch) == [(1, prompt + 8 * (response - 1))]


def test_equal_rows_are_read_once(model_path):
    execution = local(model_path, algorithms.reinforce())
    batch = training_batch(execution).select_idxs([0] * 8)
    prompt, response = len(tiny.tokenizer().encode("1+2=")), int(batch["response_mask"][0].sum())
    assert shapes_of(execution, batch) == [(1, prompt + response - 1)]


def test_the_passes_over_a_batch_share_its_plan(model_path, monkeypatch):
    """Reference, policy and update sort the rows once; with another token or another prompt they do it again."""
    trees, algorithm = [], algorithms.grpo(kl_coef=0.1)
    for module in (_packed, _micro_batches):
        monkeypatch.setattr(module, "prefix_tree", lambda *rows: trees.append(rows) or prefix_tree(*rows))
    execution = local(model_path, algorithm, max_tokens_per_micro_batch=60)
    batch = training_batch(execution)
    one = execution.log_probs(batch)
    assert (made := len(trees)) > 3
    batch["ref_log_probs"] = execution.log_probs(batch, reference=True)
    execution.update(batch, algorithm)
    assert len(trees) == made
    other = batch[:]
    other["responses"] = other["responses"].clone()
    other["responses"][0, 0] += 1
    execution.log_probs(other)
    assert len(trees) > made
    shorter = other[:]  # the same rows, but the last token of the prompts is now a response token
    shorter["prompts"], shorter["responses"] = torch.cat([other["prompts"], other["responses"]], 1).split(
        [other["prompts"].shape[1] - 1, one.shape[1] + 1], 1
    )
    shorter["response_mask"] = torch.nn.functional.pad(other["response_mask"], (1, 0), value=True)
    assert execution.log_probs(shorter).shape[1] == one.shape[1] + 1


def test_micro_batches_count_a_shared_token_once():
    """Rows of 5, 7, 6, 4 and 4 tokens: 3 are shared by the first three, 1 more by the first two, 4 by the others."""
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7, 8], [1, 2, 3, 9, 9, 9], [5, 5, 5, 5], [5, 5, 5, 5]]
    ids = torch.tensor([row + [0] * (7 - len(row)) for row in rows])
    nodes = prefix_tree(ids, ids > 0).nodes
    assert packed_micro_batches(nodes, max_tokens=100) == [[0, 1, 2, 3, 4]]
    assert packed_micro_batches(nodes, max_tokens=15) == [[0, 1, 2, 3, 4]]
    assert packed_micro_batches(nodes, max_tokens=14) == [[0, 1, 2], [3, 4]]
    assert packed_micro_batches(nodes, max_tokens=8) == [[0, 1], [2], [3, 4]]
    assert packed_micro_batches(nodes, max_tokens=7) == [[0], [1], [2], [3, 4]]
    assert packed_micro_batches(nodes, "ababa", max_tokens=13) == [[0, 2, 4], [1, 3]]
    assert packed_micro_batches(nodes[:0], max_tokens=1) == []
    with pytest.raises(ValueError, match="row 1 has 7 tokens, more than max_tokens=6"):
        packed_micro_batches(nodes, max_tokens=6)
    with pytest.raises(ValueError, match="the group or rollout of row 0 has 12 tokens, more than max_tokens=11"):
        packed_micro_batches(nodes, "ababa", max_tokens=11)


def agent_rows():
    """Two rollouts of two turns that begin alike: the second prompt is the first, its response and a tool's answer."""
    texts = [([1, 2], [3, 4]), ([1, 2, 3, 4, 9], [5, 6]), ([1, 2], [3, 7, 8]), ([1, 2, 3, 7, 8, 9], [4])]
    prompts = torch.tensor([[0] * (6 - len(prompt)) + prompt for prompt, _ in texts])
    responses = torch.tensor([response + [0] * (3 - len(response)) for _, response in texts])
    return {"prompts": prompts, "responses": responses, "attention_mask": torch.cat([prompts, responses], 1) > 0}


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
def test_histories_are_shared_across_prompts_and_responses(kind):
    """1 2 3, then 4 9 5 and 7 8 9: nine tokens of 19, as the padded batch to 1e-10 where norms are in float64."""
    model, batch = build(kind), agent_rows()
    norms_in_float64(model)
    targets = batch["responses"][batch["attention_mask"][:, 6:]][:, None]

    def log_probs_and_gradients(packing):
        logits, _ = _before_responses(model, batch, packing=packing, hidden=False)
        log_probs = logits.log_softmax(-1).gather(1, targets)
        return log_probs.detach(), gradients((log_probs * torch.arange(1, 9)[:, None]).sum(), model)

    padded, of_padded = log_probs_and_gradients(packing=False)
    use_packing(model)
    where = packed_layout(batch)
    assert where.input_ids.tolist() == [[1, 2, 3, 4, 9, 5, 7, 8, 9]]
    assert int(batch["attention_mask"].sum()) == 4 + 7 + 5 + 7
    packed, of_packed = log_probs_and_gradients(packing=True)
    torch.testing.assert_close(packed, padded, rtol=0, atol=1e-10)
    for name, gradient in of_padded.items():
        torch.testing.assert_close(of_packed[name], gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("packing", [True, False])
def test_whole_groups_are_in_a_micro_batch_or_refused(model_path, packing):
    algorithm = algorithms.gvpo()
    rows = training_batch(local(model_path, algorithm)).select_idxs([0, 2, 4, 6, 1, 3, 5, 7])

    def updated(tokens):
        execution = local(model_path, algorithm, max_tokens_per_micro_batch=tokens, packing=packing)
        return execution.update(rows, algorithm)

    whole, split = updated(None), updated(100)
    assert split.loss == pytest.approx(whole.loss, rel=1e-5)
    assert split.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    with pytest.raises(ValueError, match=r"the group.* of row \d has \d+ tokens, more than max_tokens=20"):
        updated(20)
