"""What the kernels of the head promise: the logits of all tokens are never there, and nothing is made in vain."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from rlprims import losses
from rlprims.kernels.linear_log_probs import linear_divergence, linear_log_probs, linear_token_loss
from rlprims.kernels.log_probs import log_probs_and_entropies
from rlprims.logprobs import from_hidden
from rlprims.types import SamplingSupport


class Largest(TorchDispatchMode):
    """The most elements of any memory that an operation asks for, how often it does, and the operations' names.

    Under a mode the public functions compute the formula, so the kernels are called by themselves here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.operations: set[str] = set()

    @property
    def elements(self) -> int:
        return max(self.sizes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {x.untyped_storage().data_ptr() for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        self.operations.add(func._schema.name)
        made = (x for x in tree_flatten(result)[0] if isinstance(x, Tensor))
        self.sizes += [x.numel() for x in made if x.untyped_storage().data_ptr() not in known]
        return result


def inputs(tokens: int, vocab: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, width, generator=generator, requires_grad=True)
    head = torch.randn(vocab, width, generator=generator, requires_grad=True)
    return hidden, head, torch.randint(vocab, (tokens,), generator=generator)


def plain(hidden: Tensor, head: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """All logits at once, in float64."""
    softmax = torch.distributions.Categorical(logits=hidden.double() @ head.double().T)
    return softmax.log_prob(token_ids), softmax.entropy()


@pytest.mark.slow
def test_the_mask_of_kept_sets_is_made_a_tile_at_a_time() -> None:
    """400 tokens of 50,000 ids would be 20 million elements of a mask; the sets have 8,000."""
    vocab, tokens = 50_000, 400
    hidden, head, token_ids = inputs(tokens, vocab, 4)
    ids = (token_ids[:, None] + 7 * torch.arange(20)) % vocab
    kept = SamplingSupport(ids.flatten(), 20 * torch.arange(tokens + 1))
    with Largest() as seen:
        got = linear_log_probs(hidden, head, token_ids, 1.0, None, kept)
        torch.autograd.grad(got[0].sum() + got[1].sum(), (hidden, head))
    assert seen.elements <= 2**24 < vocab * tokens
    within = (hidden[:, None] * head[ids]).sum(-1).log_softmax(-1)
    torch.testing.assert_close(got[0], within[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_many_tiles_equal_one_and_nothing_is_as_large_as_the_logits() -> None:
    """2^24 elements a tile: at a vocabulary of 152,064 that is 110 tokens, and here are 230."""
    vocab, tokens = 152_064, 230
    hidden, head, token_ids = inputs(tokens, vocab, 4)
    with Largest() as seen:
        got = linear_log_probs(hidden, head, token_ids, 1.0, None)
        torch.autograd.grad(got[0].sum() + got[1].sum(), (hidden, head), retain_graph=True)
    assert seen.elements <= 2**24 < vocab * tokens
    picked = torch.tensor([0, 109, 110, 219, 220, 229])
    log_probs, entropies = plain(hidden[picked], head, token_ids[picked])
    torch.testing.assert_close(got[0][picked].double(), log_probs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got[1][picked].double(), entropies, rtol=5e-6, atol=0)  # the sum of 152,064
    (slope,) = torch.autograd.grad(got[0][picked].sum(), head)
    (want,) = torch.autograd.grad(log_probs.sum(), head)
    torch.testing.assert_close(slope, want, rtol=1e-5, atol=1e-6)


def test_a_frozen_head_costs_no_gradient_of_it() -> None:
    """The product that makes it is not made; the gradient of the hidden states is the same."""
    hidden, head, token_ids = inputs(6, 13, 5)
    slopes = []
    for weight in (head, head.detach()):
        with Largest() as seen:
            slopes += torch.autograd.grad(linear_log_probs(hidden, weight, token_ids, 1.0, None)[0].sum(), hidden)
        assert ("aten::addmm_" in seen.operations) is weight.requires_grad
    assert torch.equal(*slopes)


def test_a_16_bit_head_is_never_cast_whole() -> None:
    vocab, width = 40_000, 64
    hidden, head, token_ids = inputs(8, vocab, width)
    hidden, head = hidden.detach().bfloat16(), head.detach().bfloat16()
    with Largest() as seen:
        linear_log_probs(hidden, head, token_ids, 1.0, None)
    assert seen.elements < vocab * width


def weighted(log_probs: Tensor, weights: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    return (-log_probs * advantages * weights)[mask].sum()


@pytest.mark.slow
def test_many_tiles_of_a_loss_and_nothing_is_as_large_as_the_logits() -> None:
    """2^24 elements a tile: at a vocabulary of 300,000 that is 55 tokens, and here are 126 of 180."""
    vocab, tokens = 300_000, 180
    hidden, head, token_ids = inputs(tokens, vocab, 3)
    mask, generator = torch.arange(tokens) % 10 < 7, torch.Generator().manual_seed(0)
    advantages = torch.randn(tokens, generator=generator)
    with Largest() as seen:
        loss, log_probs, _ = linear_token_loss(
            hidden, head, token_ids, mask / mask.sum(), mask, weighted, 1.0, None, advantages=advantages
        )
        got = torch.autograd.grad(loss, (hidden, head))
    assert seen.elements <= 2**24 < vocab * int(mask.sum())
    selected = from_hidden(hidden, head, token_ids).log_probs
    want = losses.token_mean(losses.reinforce(selected[None], advantages[None], mask[None]), mask[None])
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(log_probs[mask], selected[mask], rtol=1e-6, atol=0)
    for mine, theirs in zip(got, torch.autograd.grad(want, (hidden, head)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)


def test_without_gradient_no_product_is_made_for_one() -> None:
    hidden, head, token_ids = inputs(6, 13, 5)
    ones = torch.ones(6)
    with torch.no_grad(), Largest() as seen:
        loss, *_ = linear_token_loss(hidden, head, token_ids, ones, ones.bool(), weighted, 1.0, None, advantages=ones)
    assert not loss.requires_grad
    assert "aten::addmm_" not in seen.operations


@pytest.mark.parametrize("with_entropies", [False, True])
def test_of_logits_nothing_as_large_is_made_but_their_gradient(with_entropies: bool) -> None:
    rows, vocab = 64, 20_000
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0), requires_grad=True)
    token_ids = torch.arange(rows)[:, None]
    with Largest() as forward:
        log_probs, entropies = log_probs_and_entropies(logits, token_ids, 1.0, None, with_entropies)
    assert forward.elements < rows * vocab / 4
    total = log_probs.sum() if entropies is None else log_probs.sum() + entropies.sum()
    with Largest() as backward:
        torch.autograd.grad(total, logits)
    assert sorted(backward.sizes)[-2] < rows * vocab / 4 < backward.elements == rows * vocab


@pytest.mark.slow
def test_many_tiles_of_two_heads_and_nothing_is_as_large_as_the_logits() -> None:
    """2^24 elements a tile: at a vocabulary of 300,000 that is 55 tokens, and here are 126 of 180."""
    vocab, tokens = 300_000, 180
    hidden, head, _ = inputs(tokens, vocab, 3)
    teacher_hidden, teacher_head = (x.detach() for x in inputs(tokens + 1, vocab, 2)[:2])
    mask, measure = torch.arange(tokens) % 10 < 7, lambda z, y: (z.sigmoid() * y).mean(-1)
    with Largest() as seen:
        (got,) = linear_divergence(hidden, head, (teacher_hidden[1:], teacher_head), mask, measure)
        slopes = torch.autograd.grad(got.square().sum(), (hidden, head))
    assert seen.elements <= 2**24 < vocab * int(mask.sum())
    logits, teacher_logits = hidden @ head.T, teacher_hidden[1:] @ teacher_head.T
    want = torch.where(mask, measure(logits, teacher_logits), 0.0)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(slopes, torch.autograd.grad(want.square().sum(), (hidden, head)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)


_PEAK = """
import re, torch
from rlprims import losses
from rlprims.logprobs import fused_full_kl, fused_loss

def resident(which):
    return int(re.search(which + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

torch.set_num_threads(1)
tokens, vocab = TOKENS, 49152
hidden, head = torch.randn(tokens, 4, requires_grad=True), torch.randn(vocab, 4, requires_grad=True)
ids, mask = torch.randint(vocab, (tokens,)), torch.ones(tokens, dtype=torch.bool)
teacher = torch.randn(1, tokens, 3), torch.randn(vocab, 3)
before = resident("VmRSS")
CALL
print((resident("VmHWM") - before) / (tokens * vocab * 4 / 2**20))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("call", "tokens", "most"),
    [
        ("fused_loss(hidden, head, ids, mask / tokens, mask, losses.nll, {})", 1024, 0.8),
        ("fused_full_kl(hidden[None], head, *teacher, mask[None], divergence='jsd').sum().backward()", 2048, 0.6),
    ],
)
def test_a_tile_releases_its_memory_for_the_next(call: str, tokens: int, most: float) -> None:
    """The process holds less than the logits; with a small tensor kept from each tile it held one and a half.

    A tile is a third of these logits, and a sixth of those beside a teacher's, of which the divergence has another.
    """
    script = [sys.executable, "-c", _PEAK.replace("CALL", call).replace("TOKENS", str(tokens))]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout) < most
