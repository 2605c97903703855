"""A rotary embedding that depends on the longest row of a batch: no row is longer than its border, in any path."""

from itertools import product

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlprims import algorithms
from rlprims.execution import Sampling
from rlprims.execution.hf._alone import window_of
from tests import tiny
from tests.execution.execution_contract import local, prompts
from tests.execution.execution_families import SMALL
from tests.hybrids import alone

BORDER = 24
LONG = {
    **{"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": BORDER},
    **{"short_factor": [1.0] * 8, "long_factor": [4.0, 3.0, 2.0, 8.0] * 2},
}
SAME = {**LONG, "short_factor": LONG["long_factor"]}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
ROPES = {"longrope": LONG, "dynamic": DYNAMIC}


def save(path, rope):
    kind, window = ("phi3", 96) if rope["rope_type"] == "longrope" else ("llama", BORDER)
    more = {"original_max_position_embeddings": BORDER} if kind == "phi3" else {}
    sizes = {**SMALL, "eos_token_id": 1, "pad_token_id": 0, "max_position_embeddings": window, **more}
    config = AutoConfig.for_model(kind, **sizes, rope_parameters=rope)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize(("rope", "packing", "fused_head"), list(product(ROPES, (True, False), (True, False))))
def test_a_row_up_to_the_border_is_what_it_is_alone(tmp_path, rope, packing, fused_head):
    execution = local(save(tmp_path, ROPES[rope]), algorithms.reinforce(), packing=packing, fused_head=fused_head)
    assert execution.context_window == BORDER
    rows = prompts(["12+34= 90 ", "7", "7", "12+34= 90 "])
    batch = execution.generate(rows, Sampling(max_new_tokens=BORDER - 10), seed=0, prompt_width=10)
    assert batch["attention_mask"].sum(-1).max() == BORDER
    expected = alone(execution.training.policy.module, batch)
    torch.testing.assert_close(batch["rollout_log_probs"], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(execution.log_probs(batch), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rope", ROPES)
def test_a_row_beyond_it_is_refused(tmp_path, rope):
    """Its log-probs would be those of the longest row of its micro-batch (llama.cpp#24875)."""
    execution = local(save(tmp_path / "model", ROPES[rope]), algorithms.reinforce())
    rows, wanted = prompts(["12+34= 90 ", "7"]), rf"at most {BORDER} tokens, got \d+: a {rope} rope .* Lower sampling"
    with pytest.raises(ValueError, match=wanted):
        execution.generate(rows, Sampling(max_new_tokens=15), seed=0, prompt_width=10)
    another = local(save(tmp_path / "another", SAME), algorithms.reinforce())
    with pytest.raises(ValueError, match=wanted):
        execution.log_probs(another.generate(rows, Sampling(max_new_tokens=80), seed=0, prompt_width=10))


def test_one_set_of_factors_has_no_border(tmp_path):
    """As vLLM computes with a longer window: the setting for rows beyond the border."""
    execution = local(save(tmp_path, SAME), algorithms.reinforce())
    batch = execution.generate(prompts(["12+34= 90 ", "7"]), Sampling(max_new_tokens=40), seed=0, prompt_width=10)
    assert batch["attention_mask"].sum(-1).max() > BORDER
    expected = alone(execution.training.policy.module, batch)
    torch.testing.assert_close(batch["rollout_log_probs"], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(execution.log_probs(batch), expected, rtol=0, atol=1e-5)


def test_windows():
    def config(**settings):
        return AutoConfig.for_model("llama", **{**SMALL, **settings})

    assert window_of(config()) == 64
    assert window_of(config(rope_parameters={**LONG, "original_max_position_embeddings": 128})) == 64
    yarn = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
    assert window_of(config(rope_parameters=yarn)) == 64
    assert window_of(AutoConfig.for_model("bloom")) == 2**31 - 2
