"""Models with states: their samples and scores are those of each row alone, beside shorter and longer prompts."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from rlprims import algorithms
from rlprims.execution import Sampling
from tests import tiny
from tests.execution.execution_contract import local, prompts
from tests.hybrids import HYBRIDS, NO_ATTENTION, alone, save_hybrid

FAST = ("qwen3_5_text", "lfm2", "falcon_h1")
LATE = (pytest.mark.slow, pytest.mark.release)
TEXTS = ["1+2="] * 3 + ["7", "17-3=", "7"] + ["12+34= 90"] * 3


@pytest.mark.parametrize("kind", [k if k in FAST else pytest.param(k, marks=LATE) for k in HYBRIDS])
def test_a_row_is_what_it_is_alone(tmp_path, kind):
    """In a batch that rows leave; paged caches refuse these layers (transformers#48305)."""
    more = {"attention": "eager"} if kind in NO_ATTENTION else {}
    path = save_hybrid(tmp_path, kind)
    # Of 32 tokens eight end a response, so that rows end at other times, and leave.
    GenerationConfig(eos_token_id=list(range(8)), pad_token_id=tiny.PAD_ID).save_pretrained(path)
    execution = local(path, algorithms.reinforce(), packing=False, **more)
    batch = execution.generate(prompts(TEXTS), Sampling(max_new_tokens=16), seed=1, prompt_width=9)
    assert batch["response_mask"].sum(-1).unique().numel() > 2
    expected = alone(execution.training.policy.module, batch)
    torch.testing.assert_close(batch["rollout_log_probs"], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(execution.log_probs(batch), expected, rtol=1e-5, atol=1e-5)


def test_padding_that_becomes_a_state_is_refused(tmp_path):
    """transformers sets the input of a convolution to 0 where it is padding, before the projection adds its bias."""
    with pytest.raises(ValueError, match=r"mamba\.in_proj makes one of it"):
        local(save_hybrid(tmp_path, "falcon_h1", mamba_proj_bias=True), algorithms.reinforce(), packing=False)


def test_a_type_that_is_not_sampled_is_named(tmp_path):
    config = AutoConfig.for_model("xlnet", vocab_size=32, d_model=32, d_inner=48, n_layer=2, n_head=4, d_head=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the local sampler does not have a xlnet: set execution: ray"):
        local(tmp_path, algorithms.reinforce(), attention="eager")
