"""The local sampler: its draw is a quantile, from a counter; it reads a prompt once, and finished rows leave."""

import pytest
import torch
from execution_contract import local, prompts
from execution_families import SMALL
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from rlprims import algorithms
from rlprims.execution import Sampling
from rlprims.execution.hf._sampler import choose, uniforms
from tests import tiny

PROBABILITIES = torch.tensor([0.4, 0.0, 0.05, 0.25, 0.3, 0.0])
LOGITS = PROBABILITIES.log()
COUNT = 20_000


def drawn(*u):
    return choose(LOGITS.expand(len(u), -1), torch.tensor(u, dtype=torch.float64)).tolist()


def test_a_token_has_the_quantiles_of_its_probability():
    assert drawn(0.0, 0.39, 0.41, 0.44, 0.46, 0.69, 0.71, 0.99) == [0, 0, 2, 2, 3, 3, 4, 4]


def test_a_banned_token_is_never_chosen_even_at_the_ends():
    logits = torch.tensor([[-torch.inf, 2.0, -torch.inf, 1.0, -torch.inf]])
    below_one = 1 - 2.0**-53
    chosen = choose(logits.expand(2, -1), torch.tensor([0.0, below_one], dtype=torch.float64))
    assert chosen.tolist() == [1, 3]


def test_without_a_draw_it_is_the_likeliest():
    assert choose(torch.stack([LOGITS, LOGITS.flip(0)]), None).tolist() == [0, 5]


@pytest.fixture(scope="module")
def draws():
    return uniforms(1, range(COUNT), 3)


def test_frequencies_are_the_probabilities(draws):
    """Pearson's statistic with 3 degrees of freedom is below 16.3 in 999 of 1000 cases; the seed is fixed."""
    for position in range(3):
        chosen = choose(LOGITS.expand(COUNT, -1), draws[:, position])
        counts = torch.bincount(chosen, minlength=6)
        assert counts[PROBABILITIES == 0].sum() == 0
        expected = COUNT * PROBABILITIES
        statistic = ((counts - expected).square() / expected)[PROBABILITIES > 0].sum()
        assert statistic < 16.3


def test_positions_and_samples_are_independent(draws):
    assert torch.corrcoef(draws.T).fill_diagonal_(0).abs().max() < 4 / COUNT**0.5
    neighbours = torch.stack([draws[:-1, 0], draws[1:, 0]])
    assert torch.corrcoef(neighbours)[0, 1].abs() < 4 / COUNT**0.5


def test_a_draw_depends_on_seed_and_id_alone(draws):
    assert torch.equal(uniforms(1, [7, 3], 3), draws[[7, 3]])
    assert torch.equal(uniforms(1, [7], 2), draws[[7], :2])
    assert not torch.isin(uniforms(2, range(100), 3), draws[:100]).any()
    assert uniforms(1, [], 3).shape == (0, 3)


def test_the_stream_is_what_it_was():
    """A run that is resumed or replayed under another version must meet the same samples."""
    assert uniforms(0, [0, 1], 2).tolist() == [
        [0.011546754286331562, 0.24154919656271812],
        [0.8133540609793564, 0.7513314251083365],
    ]


def test_large_seeds_and_ids_are_exact():
    """Evaluation seeds start at 2**32; ids count all samples of a run."""
    assert len(set(uniforms(2**32 + 5, [2**53, 2**53 + 1], 1)[:, 0].tolist())) == 2


def test_a_prompt_is_read_once_and_finished_rows_leave(model_path):
    execution, shapes = local(model_path, algorithms.reinforce()), []
    module = execution.training.policy.module
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    rows = prompts(["1+2=", "7-3="] * 20)
    batch = execution.generate(rows, Sampling(max_new_tokens=24), seed=0, prompt_width=4)
    hook.remove()
    assert shapes[0] == (2, 4)
    assert shapes[1] == (40, 1)
    read = [rows for rows, _ in shapes[1:]]
    active = [int((batch["response_mask"].sum(-1) > t).sum()) for t in range(1, len(shapes))]
    assert read == sorted(read, reverse=True)
    assert all(a <= rows <= a / (7 / 8) + 1 for a, rows in zip(active, read, strict=True))
    assert read[-1] < 40


HEADS = {**SMALL, "eos_token_id": tiny.EOS_ID, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
MODELS = {
    "heads that share keys": lambda: LlamaForCausalLM(LlamaConfig(**HEADS)),
    "a window of 3": lambda: MistralForCausalLM(MistralConfig(**HEADS, sliding_window=3)),
    "learned positions": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=2, initializer_range=0.2, eos_token_id=tiny.EOS_ID)
    ),
}


@pytest.mark.parametrize("texts", [["1+2="] * 6, ["1+2=", "17-3=", "7"] * 4], ids=["one length", "padded"])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_token_by_token_the_model_says_what_it_says_of_the_whole(tmp_path, name, packing, texts):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        MODELS[name]().save_pretrained(tmp_path)
    execution = local(tmp_path, algorithms.reinforce(), packing=packing)
    batch = execution.generate(prompts(texts), Sampling(max_new_tokens=12), seed=0, prompt_width=5)
    assert batch["response_mask"].sum() > 20
    torch.testing.assert_close(batch["rollout_log_probs"], execution.log_probs(batch), rtol=1e-5, atol=1e-5)
