"""Every type of model: rows in a batch have the log-probs and the gradients that each has alone, or it is refused.

By default some types are tested by their numbers alone; ``-m slow`` tests more, with samplers, files and runs; a
release tests all.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MAPPING

from rlprims import algorithms
from rlprims.data_proto import DataProto
from rlprims.execution import LoraConfig, ModelConfig, Sampling
from rlprims.execution.hf import Training, with_counts
from rlprims.execution.hf._adapters import adapt, trained
from rlprims.execution.hf._adapters import merged as merge
from rlprims.execution.hf._families import (
    FUSED_HEAD_MODELS,
    NOT_SAMPLED,
    REFUSED,
    SHARDED_MODELS,
    check_sampled,
    check_type,
    why_padded,
)
from rlprims.execution.hf._forward import check_fused_head, token_scores
from rlprims.execution.hf._models import empty_causal_lm, load_causal_lm
from rlprims.execution.hf._packed import is_packed, use_packing
from rlprims.execution.hf._sampling import sample
from tests import tiny
from tests.execution import zoo
from tests.execution.execution_contract import OPTIMIZER
from tools import model_table

FAST = (
    *("deepseek_v3", "ernie4_5", "gemma2", "gemma4_text", "glm4", "glm4_moe", "gpt_oss", "kimi_linear", "lfm2"),
    *("mamba2", "mimo_v2_flash", "minimax_m2", "ministral3", "nemotron", "olmo3", "qwen3_5", "qwen3_next"),
)
CHOSEN = (
    *("afmoe", "apertus", "bamba", "bert", "bloom", "cohere2", "dbrx", "deepseek_v2", "diffllama"),
    *("falcon_h1", "gemma3n_text", "gpt2", "gpt_neo", "gptj", "granitemoehybrid", "jamba", "llama"),
    *("mpt", "nemotron_h", "opt", "phi3", "qwen2_moe", "stablelm", "xlnet", "zamba2"),
)
"""Beside those of FAST one of each family of blocks: other positions, masks, states, caches, experts."""
KINDS = [kind for kind in MAPPING if kind not in REFUSED and kind not in zoo.NOT_HERE]
SLOW = {kind: [pytest.mark.slow, *[pytest.mark.release][kind in (*FAST, *CHOSEN) :]] for kind in KINDS}
EACH = [pytest.param(kind, marks=() if kind in FAST else SLOW[kind]) for kind in KINDS]
ALL = [pytest.param(kind, marks=SLOW[kind]) for kind in KINDS]


def batch():
    """Ragged rows beyond the windows of the zoo; two have the same prompt, one a single token of response."""
    prompts = torch.tensor([[0, 0, 0, 5, 6], [7, 5, 6, 9, 11], [0, 0, 8, 9, 10], [7, 5, 6, 9, 11]])
    responses = torch.randint(2, zoo.VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(1))
    in_prompt = torch.tensor([2, 5, 3, 5])[:, None] > torch.arange(4, -1, -1)
    return with_responses(prompts, in_prompt, responses, torch.arange(8) < torch.tensor([8, 1, 5, 3])[:, None])


def with_responses(prompts, in_prompt, responses, mask):
    return {"prompts": prompts, "responses": responses, "attention_mask": torch.cat([in_prompt, mask], 1)}


def alone(model, rows, i):
    """(t,): the log-probs of one row's response, without padding, cache or library."""
    attended = rows["attention_mask"][i]
    ids, length = torch.cat([rows["prompts"], rows["responses"]], 1)[i][attended], int(attended[5:].sum())
    logits = model(input_ids=ids[None], use_cache=False).logits[0, -length - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, ids[-length:, None])[:, 0]


def each_alone(model, rows):
    found = torch.zeros(rows["responses"].shape)
    with torch.no_grad():
        for i in range(len(found)):
            found[i, : len(row)] = (row := alone(model, rows, i))
    return found


def close(actual, expected, atol=1e-5, rtol=0.0):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def log_probs(model, **how):
    how = {"packing": is_packed(model), "fused_head": False} | how
    return token_scores(model, batch(), temperature=1.0, wanted=["log_probs"], **how)["log_probs"]


def type_of(model):
    return model.config.get_text_config().model_type


@pytest.mark.parametrize("kind", EACH)
def test_rows_are_those_alone(kind):
    """Padded, packed and by a fused head; and the gradient of one row. What is not offered is refused by name."""
    model = zoo.build(kind)
    expected = each_alone(model, batch())
    parameters = [p for p in model.parameters() if p.requires_grad]

    def gradients(row):
        found = torch.autograd.grad(row.sum(), parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([x.flatten() for x in found])

    of_row = gradients(alone(model, batch(), 2))
    close(log_probs(model).detach(), expected)
    if why_padded(model.config) is None:
        use_packing(model)
        close(log_probs(model).detach(), expected)
    else:
        with pytest.raises(
            ValueError, match=rf"model.packing: a {type_of(model)} is padded.* set model.packing: false"
        ):
            use_packing(model)
    close(gradients(log_probs(model)[2, :5]), of_row, atol=2e-4 * float(of_row.abs().max()))
    if type_of(model) in FUSED_HEAD_MODELS:
        check_fused_head(model)
        close(log_probs(model, fused_head=True).detach(), expected)
    else:
        with pytest.raises(ValueError, match=r"Set model\.fused_head: false"):
            check_fused_head(model)


@pytest.mark.parametrize("kind", ALL)
def test_sampled_rows_are_those_alone(kind):
    """Six rows of three prompts, most of which end before the others."""
    model = zoo.build(kind)
    if type_of(model) in NOT_SAMPLED:
        with pytest.raises(ValueError, match="set execution: ray"):
            check_sampled(model)
        return
    rows, source = batch(), torch.tensor([0, 0, 1, 1, 2, 2])
    in_prompt, ends = rows["attention_mask"][:, :5], torch.arange(1, 20)
    how = {"seeds": torch.arange(6) * 7919, "end_ids": ends, "pad_id": 0}
    found = sample(model, rows["prompts"][:3], in_prompt[:3], source, Sampling(max_new_tokens=8), **how)
    again = with_responses(rows["prompts"][source], in_prompt[source], found.tokens, found.mask)
    close(found.log_probs, each_alone(model, again))
    if why_padded(model.config) is None:
        use_packing(model)
        fixed = sample(model, rows["prompts"][:3], in_prompt[:3], source, Sampling(max_new_tokens=8), fixed=True, **how)
        assert torch.equal(fixed.tokens, found.tokens)
        close(fixed.log_probs, found.log_probs)


@pytest.mark.parametrize("kind", EACH)
def test_merged_adapters_are_those_beside_the_weights(kind):
    """By ``all-linear``; for a mixture in attention and shared experts."""
    adapted, merged = zoo.build(kind), zoo.build(kind)
    adapt(adapted, LoraConfig(rank=2))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in trained(adapted).items():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.1, generator=generator)
    merged.load_state_dict(merge(adapted, adapted.state_dict()))
    before = each_alone(zoo.build(kind), batch())
    expected = each_alone(adapted, batch())
    assert (expected - before).abs().max() > 1e-3
    if why_padded(adapted.config) is None:
        use_packing(adapted)
    close(log_probs(adapted).detach(), expected, rtol=1e-5)
    close(each_alone(merged, batch()), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [("mamba2", "out_proj"), ("jamba", "dt_proj"), ("longcat_flash", "classifier"), ("zamba", "q_proj")],
)
def test_adapters_that_the_model_would_pass_by_are_refused(kind, layer):
    with pytest.raises(ValueError, match=rf"target_modules: .*{layer} is not .* that alone reads its weight"):
        adapt(zoo.build(kind), LoraConfig(target_modules=(layer,)))


@pytest.mark.parametrize("kind", ALL)
def test_the_defaults_train_it(kind, tmp_path):
    """A saved model is loaded, scores as before, and does an update. Ranks can read its files if that is declared."""
    model = zoo.build(kind)
    expected = each_alone(model, batch())
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), device="cpu")
    algorithm = algorithms.reinforce()
    training = Training(config, OPTIMIZER, algorithm=algorithm, temperature=1.0, updates=2)
    mask = batch()["attention_mask"][:, 5:]
    rows = DataProto.from_dict(tensors={**batch(), "response_mask": mask, "advantages": mask * 1.0})
    close(training.log_probs(rows), expected)
    whole, totals = with_counts(rows, algorithm)
    assert training.update(whole, algorithm, totals).grad_norm > 0
    assert (training.log_probs(rows) - expected).abs().max() > 1e-4
    if type_of(model) in SHARDED_MODELS and not CONFIG_MAPPING[kind].sub_configs:
        torch.use_deterministic_algorithms(True)  # memory without data is NaN
        try:
            empty = empty_causal_lm(str(tmp_path), config)
        finally:
            torch.use_deterministic_algorithms(False)
        assert {*empty.state_dict()} == {name for name, _ in empty.named_parameters(remove_duplicate=False)}
        empty.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False, assign=True)
        empty.tie_weights()
        close(each_alone(empty, batch()), expected)


def test_every_type_of_transformers_is_in_the_table():
    """A new transformers has new types: read them by tools/model_table.py, and run this file with ``-m slow``."""
    known = json.loads(model_table.TYPES.read_text())["types"]
    for kind, each in model_table.types_here().items():
        assert known[kind] | each == known[kind], kind
    assert model_table.PAGE.read_text() == model_table.table(), "docs/models.md is stale: run make pages"


@pytest.mark.ray
def test_what_vllm_has_is_in_the_table():
    has = model_table.vllm_here()
    known = json.loads(model_table.TYPES.read_text())["types"]
    assert {kind: each["vllm"] for kind, each in known.items()} == {
        kind: has.get(each["class"], "") for kind, each in known.items()
    }


@pytest.mark.parametrize("kind", REFUSED)
def test_types_with_other_numbers_in_a_batch_are_refused(kind):
    settings = SimpleNamespace(model_type=kind, get_text_config=lambda: SimpleNamespace(model_type=kind))
    with pytest.raises(ValueError, match=r"is refused: its? .*; set model.path to .* docs/models.md$"):
        check_type(settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind for kind in REFUSED if kind in MAPPING and kind not in (*zoo.NOT_HERE, "git", "mllama", "moshi")]
)
def test_what_is_refused_would_be_wrong(kind):
    model = zoo.build(kind)
    expected = each_alone(model, batch())
    try:
        found = log_probs(model)
    except (IndexError, TypeError):
        return
    assert (found - expected).abs().max() > 1e-5


@pytest.mark.parametrize("kind", ["aya_vision", "llava_next", "got_ocr2"])
def test_multimodal_models_are_refused_by_that_word(kind, tmp_path):
    CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"a {kind} is refused: it is multimodal[^\n]*docs/models.md$"):
        load_causal_lm(str(tmp_path), ModelConfig(path=str(tmp_path), device="cpu"))


def test_another_attention_is_padded_and_a_wrong_one_refused(tmp_path):
    zoo.build("gpt_oss").save_pretrained(tmp_path)
    packed, padded = (
        load_causal_lm(str(tmp_path), ModelConfig(path=str(tmp_path), device="cpu", attention=attention))
        for attention in (None, "eager")
    )
    assert is_packed(packed)
    assert not is_packed(padded)
    close(log_probs(packed), log_probs(padded))
    with pytest.raises(ValueError, match=r"this type has no attention sdpa: leave model\.attention out$"):
        load_causal_lm(str(tmp_path), ModelConfig(path=str(tmp_path), device="cpu", attention="sdpa"))
