"""Sampling with keys and values in fixed places, and by CUDA graphs: the tokens and log-probs of a cache that grows."""

import warnings

import pytest
import torch

from rlprims.execution import Sampling
from rlprims.execution.hf import _cache
from rlprims.execution.hf._packed import use_packing
from rlprims.execution.hf._sampling import sample
from tests.execution import zoo

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def sampled(model, *, fixed, new=8, ends=range(1, 20), device="cpu", **sampling):
    """Six rows of three prompts of 2, 5 and 3 tokens, most of which end before the others."""
    prompts = torch.tensor([[0, 0, 0, 5, 6], [7, 5, 6, 9, 11], [0, 0, 8, 9, 10]], device=device)
    how = {"seeds": torch.arange(6) * 7919, "end_ids": torch.tensor([*ends], device=device), "pad_id": 0}
    source = torch.tensor([0, 0, 1, 1, 2, 2], device=device)
    return sample(model, prompts, prompts != 0, source, Sampling(max_new_tokens=new, **sampling), fixed=fixed, **how)


def check_same(model, decodes, **how):
    decodes.clear()
    grown, fixed = (sampled(model, fixed=fixed, **how) for fixed in (False, True))
    assert decodes == [True]
    assert torch.equal(fixed.tokens, grown.tokens)
    assert torch.equal(fixed.mask, grown.mask)
    torch.testing.assert_close(fixed.log_probs, grown.log_probs, rtol=0, atol=1e-5)
    return grown


@pytest.fixture
def decodes(monkeypatch):
    """For each sampling that could have fixed places, whether it has."""
    found = []
    has_decode = _cache.has_decode
    monkeypatch.setattr(_cache, "has_decode", lambda *args: found.append(has_decode(*args)) or found[-1])
    return found


def packed(kind, **changes):
    model = zoo.build(kind, **changes)
    use_packing(model)
    return model


@pytest.mark.parametrize("kind", ["mistral", "gpt_oss", "gemma3_text"])
def test_a_window_is_no_limit_to_rows_that_fit_into_it(kind, decodes):
    check_same(packed(kind, sliding_window=13), decodes)
    sampled(packed(kind, sliding_window=12), fixed=True)  # 5 + 8 tokens
    assert decodes == [True, False]


def test_places_for_further_tokens(decodes):
    """Rows end before and after the 128 further tokens, for which the first places are."""
    found = check_same(packed("llama", max_position_embeddings=512), decodes, new=300, ends=[3])
    lengths = found.mask.sum(-1)
    assert lengths.min() < 64 < 150 < lengths.max()


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.8}])
def test_every_way_to_draw(sampling, decodes):
    found = check_same(packed("qwen3"), decodes, **sampling)
    assert (found.kept_ids is not None) == bool({"top_k", "top_p"} & {*sampling})


def test_a_model_that_is_not_packed_has_a_cache_that_grows(decodes):
    sampled(zoo.build("llama"), fixed=True)
    assert decodes == [False]


@GPU
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.8}])
def test_graphs(sampling, decodes):
    check_same(packed("llama", max_position_embeddings=512).cuda(), decodes, device="cuda", new=300, **sampling)


@GPU
def test_a_model_that_waits_for_a_number_is_sampled_without_graphs(decodes):
    model = packed("llama").cuda()
    model.model.norm.register_forward_hook(lambda module, inputs, output: output * bool(output.isfinite().all()))
    with pytest.warns(UserWarning, match="without a CUDA graph"):
        fixed = sampled(model, fixed=True, device="cuda")
    assert torch.equal(fixed.tokens, sampled(model, fixed=False, device="cuda").tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_same(packed("llama").cuda(), decodes, device="cuda")
