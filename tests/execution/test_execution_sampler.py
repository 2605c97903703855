"""The local sampler: its noise is a hash, which an engine has too; it reads a prompt once, and finished rows leave."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from rlprims import algorithms
from rlprims.execution import Sampling
from rlprims.execution.hf._draw import draw, gumbel, sample_seeds
from tests import tiny
from tests.execution.execution_contract import local, prompts
from tests.execution.execution_families import SMALL

PROBABILITIES = torch.tensor([0.4, 0.0, 0.05, 0.25, 0.3, 0.0])
LOGITS = PROBABILITIES.log()
COUNT = 20_000


def murmur3(*words):
    """MurmurHash3 for x86, 32 bits, seed 0, of whole words: in Python's integers, after Appleby's description."""
    mask = 2**32 - 1

    def rotated(x, bits):
        return (x << bits | x >> (32 - bits)) & mask

    h = 0
    for word in words:
        h = rotated(h ^ rotated(word * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask, 13) * 5 + 0xE6546B64 & mask
    h ^= 4 * len(words)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


def test_the_noise_is_that_of_the_published_hash():
    assert murmur3(int.from_bytes(b"test", "little")) == 0xBA6BD213  # as Appleby's own code says
    seeds, positions = sample_seeds(3, range(40)), torch.arange(40) * 977
    for seed, position, noise in zip(seeds.tolist(), positions.tolist(), gumbel(seeds, positions, 50), strict=True):
        words = [murmur3(seed & (2**32 - 1), seed >> 32, position, token) for token in range(50)]
        u = (torch.tensor(words, dtype=torch.float64) + 0.5) / 2**32
        torch.testing.assert_close(noise.double(), -torch.log(-torch.log1p(-u)), rtol=1e-5, atol=1e-5)


def test_the_likeliest_word_of_bits_has_finite_noise():
    """u rounds to 1 for the largest words; the noise there is the least that there is, and no infinity."""
    noise = gumbel(sample_seeds(0, range(64)), torch.arange(64), 2**15)
    assert noise.isfinite().all()
    assert noise.min() < -2.7
    assert noise.max() > 12


def test_a_banned_token_is_never_drawn():
    logits = torch.tensor([-torch.inf, 2.0, -torch.inf, 1.0, -torch.inf]).expand(COUNT, -1)
    assert set(draw(logits, sample_seeds(0, range(COUNT)), torch.zeros(COUNT, dtype=torch.int64)).tolist()) == {1, 3}


@pytest.mark.parametrize("of", ["samples", "positions"])
def test_frequencies_are_the_probabilities(of):
    """Pearson's statistic with 3 degrees of freedom is below 16.3 in 999 of 1000 cases; the seed is fixed."""
    for start in range(3):
        if of == "samples":
            seeds, positions = sample_seeds(1, range(COUNT)), torch.full((COUNT,), start)
        else:
            seeds, positions = sample_seeds(1, [start]).expand(COUNT), torch.arange(COUNT)
        counts = torch.bincount(draw(LOGITS.expand(COUNT, -1), seeds, positions), minlength=6)
        assert counts[PROBABILITIES == 0].sum() == 0
        expected = COUNT * PROBABILITIES
        statistic = ((counts - expected).square() / expected)[PROBABILITIES > 0].sum()
        assert statistic < 16.3


def test_samples_positions_and_tokens_are_independent():
    seeds = sample_seeds(1, range(COUNT // 4))
    columns = torch.cat([gumbel(seeds, torch.full_like(seeds, position), 5) for position in (0, 1, 2, 50)], 1)
    assert torch.corrcoef(columns.T).fill_diagonal_(0).abs().max() < 5 / len(seeds) ** 0.5
    neighbours = torch.stack([columns[:-1, 0], columns[1:, 0]])
    assert torch.corrcoef(neighbours)[0, 1].abs() < 4 / len(seeds) ** 0.5


def test_a_draw_depends_on_seed_and_position_alone():
    seeds, positions = sample_seeds(1, range(300)), torch.arange(300) % 7
    logits = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0))
    whole = draw(logits, seeds, positions)
    rows = torch.tensor([70, 3, 211])
    assert torch.equal(draw(logits[rows], seeds[rows], positions[rows]), whole[rows])
    assert (draw(logits, seeds, positions + 1) != whole).sum() > 200
    assert not torch.isin(sample_seeds(2, range(100)), seeds).any()
    assert draw(logits[:0], seeds[:0], positions[:0]).shape == (0,)


def test_the_stream_is_what_it_was():
    """A run that is resumed or replayed under another version must meet the same samples."""
    assert sample_seeds(0, [0, 1]).tolist() == [1576848291327681832, 9221934688551543782]
    drawn = draw(torch.zeros(8, 1000), sample_seeds(0, range(8)), torch.arange(8))
    assert drawn.tolist() == [852, 726, 443, 490, 627, 6, 840, 179]


def test_large_seeds_and_ids_are_exact():
    """Evaluation seeds start at 2**32; ids count all samples of a run."""
    seeds = sample_seeds(2**32 + 5, [2**53, 2**53 + 1])
    assert seeds[0] != seeds[1]
    assert (seeds >= 0).all()


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
