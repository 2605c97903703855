"""Log-prob and entropy in one sweep are those of the two functions."""

import pytest
import torch

from rlprims.logprobs import entropy_from_logits, from_logits, from_logits_with_entropy
from rlprims.testing import check_logits


def both_added(logits: torch.Tensor, token_ids: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    log_probs, entropies = from_logits_with_entropy(logits, token_ids, temperature=temperature)
    return 2 * log_probs + entropies


def test_the_laws_hold_for_their_sum() -> None:
    check_logits(both_added, alternatives={"temperature": 0.5})


@pytest.mark.parametrize("inplace", [False, True])
def test_values_and_gradient_are_those_of_two_calls(inplace: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    leaf = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(7, (2, 3, 2), generator=generator)  # two of each row
    g, h = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, 3, 2), (2, 3)))
    h[0, 0] = 0.0
    got = from_logits_with_entropy(leaf * 3, tokens, temperature=0.7, inplace_backward=inplace)
    want = from_logits(leaf * 3, tokens, temperature=0.7), entropy_from_logits(leaf * 3, temperature=0.7)
    torch.testing.assert_close(tuple(got), want, rtol=0, atol=1e-13)
    slopes = [torch.autograd.grad((x[0] * g).sum() + (x[1] * h).sum(), leaf)[0] for x in (got, want)]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-13)


def test_a_loss_may_read_one_of_them() -> None:
    leaf = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    tokens = torch.arange(4)
    for mine, theirs in zip(
        from_logits_with_entropy(leaf, tokens), (from_logits(leaf, tokens), entropy_from_logits(leaf)), strict=True
    ):
        slopes = [torch.autograd.grad(x.sum(), leaf, retain_graph=True)[0] for x in (mine, theirs)]
        torch.testing.assert_close(*slopes, rtol=0, atol=1e-13)


def test_large_vocabularies_add_up() -> None:
    """The sum of 300,000 exponentials in sequence is wrong by 1e-6 of it in float32; in pairs it is not."""
    logits = torch.randn(2, 300_000, generator=torch.Generator().manual_seed(0))
    got, want = (from_logits_with_entropy(x, torch.tensor([0, 1])) for x in (logits, logits.double()))
    torch.testing.assert_close(got.entropies.double(), want.entropies, rtol=3e-7, atol=0)
    torch.testing.assert_close(got.log_probs.double(), want.log_probs, rtol=3e-7, atol=0)
