"""The local sampler's draw: a quantile of the distribution, from a counter."""

import pytest
import torch

from rlprims.execution.hf._sampler import choose, uniforms

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
