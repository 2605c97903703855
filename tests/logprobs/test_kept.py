"""Log-probs within the set that the sampler kept: the truncated policy, whatever path computes it."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from rlprims import diagnostics, losses
from rlprims.logprobs import entropy_from_logits, from_hidden, from_logits, from_logits_with_entropy, fused_loss
from rlprims.testing import check_transforms
from rlprims.types import SamplingSupport

VOCAB, WIDTH, TOKENS = 13, 5, 12


def inputs(tokens: int = TOKENS, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, head, torch.randint(VOCAB, (tokens,), generator=generator)


def some_sets(token_ids: Tensor) -> tuple[SamplingSupport, Tensor]:
    """Sets of one to V ids around each token, a third of them free, some by what is left out; also as a mask."""
    sets = [sorted({(int(token) + j) % VOCAB for j in range(1 + 5 * i % VOCAB)}) for i, token in enumerate(token_ids)]
    sets = [[] if i % 3 == 2 else ids for i, ids in enumerate(sets)]
    allowed = torch.tensor([[not ids or v in ids for v in range(VOCAB)] for ids in sets])
    sets = [[~v for v in range(VOCAB) if v not in ids] if i % 4 == 1 and ids else ids for i, ids in enumerate(sets)]
    counts = torch.tensor([len(ids) for ids in sets])
    return SamplingSupport.from_counts(
        torch.tensor([v for ids in sets for v in ids], dtype=torch.int32), counts
    ), allowed


def everything(tokens: int) -> SamplingSupport:
    return SamplingSupport.from_counts(torch.arange(VOCAB).repeat(tokens), torch.full((tokens,), VOCAB))


def nothing(tokens: int) -> SamplingSupport:
    return SamplingSupport.from_counts(torch.zeros(0, dtype=torch.int64), torch.zeros(tokens, dtype=torch.int64))


def by_logits(hidden: Tensor, head: Tensor, token_ids: Tensor, kept: SamplingSupport | None) -> tuple[Tensor, Tensor]:
    return from_logits_with_entropy(hidden @ head.T, token_ids, kept, temperature=0.7)


def by_two_calls(
    hidden: Tensor, head: Tensor, token_ids: Tensor, kept: SamplingSupport | None
) -> tuple[Tensor, Tensor]:
    logits = hidden @ head.T
    return from_logits(logits, token_ids, kept, temperature=0.7), entropy_from_logits(logits, kept, temperature=0.7)


def by_hidden(hidden: Tensor, head: Tensor, token_ids: Tensor, kept: SamplingSupport | None) -> tuple[Tensor, Tensor]:
    return from_hidden(hidden, head, token_ids, kept, temperature=0.7)


PATHS = pytest.mark.parametrize("path", [by_logits, by_two_calls, by_hidden])
Path = Callable[[Tensor, Tensor, Tensor, SamplingSupport | None], tuple[Tensor, Tensor]]


def gradients(
    path: Path, kept: SamplingSupport | None, tokens: int = TOKENS, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    hidden, head, token_ids = inputs(tokens, dtype)
    log_probs, entropies = path(hidden, head, token_ids, kept)
    slopes = torch.linspace(-1, 2, tokens, dtype=log_probs.dtype)
    total = (slopes * log_probs).sum() + (slopes.flip(0) * entropies).sum()
    return [log_probs, entropies, *torch.autograd.grad(total, (hidden, head))]


def only_once(kernels: str) -> None:
    if kernels == "0":
        pytest.skip("transforms compute the formula with kernels too")


def test_by_hand() -> None:
    """Logits log 1, log 2, log 5: among the first two 1/3 and 2/3, of all 1/8, 2/8, 5/8."""
    logits = torch.tensor([[1.0, 2.0, 5.0], [1.0, 2.0, 5.0]], dtype=torch.float64).log()
    kept = SamplingSupport(torch.tensor([0, 1]), torch.tensor([0, 2, 2]))
    log_probs, entropies = from_logits_with_entropy(logits, torch.tensor([1, 1]), kept)
    assert log_probs.exp().tolist() == pytest.approx([2 / 3, 2 / 8])
    assert float(entropies[0]) == pytest.approx(math.log(3) - 2 / 3 * math.log(2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("whole", [everything, nothing])
@PATHS
def test_sets_of_the_whole_vocabulary_change_no_bit(
    path: Path, whole: Callable[[int], SamplingSupport], dtype: torch.dtype
) -> None:
    for got, want in zip(gradients(path, whole(TOKENS), dtype=dtype), gradients(path, None, dtype=dtype), strict=True):
        assert torch.equal(got, want)


@PATHS
def test_values_and_gradients_are_those_of_masked_logits(path: Path) -> None:
    hidden, head, token_ids = inputs()
    kept, allowed = some_sets(token_ids)
    logits = ((hidden @ head.T) / 0.7).masked_fill(~allowed, -torch.inf)
    scores = logits.log_softmax(-1)
    probabilities = scores.exp()
    log_probs = scores.gather(-1, token_ids[:, None])[:, 0]
    entropies = -(probabilities * scores.masked_fill(~allowed, 0.0)).sum(-1)
    slopes = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    total = (slopes * log_probs).sum() + (slopes.flip(0) * entropies).sum()
    want = [log_probs, entropies, *torch.autograd.grad(total, (hidden, head))]
    for got, plain in zip(gradients(path, kept), want, strict=True):
        torch.testing.assert_close(got, plain, rtol=1e-12, atol=1e-12)


@PATHS
def test_the_gradient_is_the_derivative(path: Path) -> None:
    hidden, head, token_ids = inputs(4)
    kept, _ = some_sets(token_ids)
    assert torch.autograd.gradcheck(lambda h, w: tuple(path(h, w, token_ids, kept)), (hidden, head))
    assert torch.autograd.gradgradcheck(lambda h, w: tuple(path(h, w, token_ids, kept)), (hidden, head))


def test_the_gradient_of_a_logit_outside_the_set_is_exactly_zero() -> None:
    hidden, head, token_ids = inputs()
    kept, allowed = some_sets(token_ids)
    logits = (hidden @ head.T).detach().requires_grad_()
    log_probs, entropies = from_logits_with_entropy(logits, token_ids, kept)
    (slopes,) = torch.autograd.grad(log_probs.sum() - entropies.sum(), logits)
    assert (slopes[~allowed] == 0).all()
    assert (slopes[allowed & (allowed.sum(-1, keepdim=True) > 1)] != 0).all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e38])
def test_a_logit_outside_the_set_is_not_read(poison: float) -> None:
    hidden, head, token_ids = inputs()
    kept, allowed = some_sets(token_ids)
    logits = (hidden @ head.T).detach()
    outcomes = []
    for x in (logits, logits.masked_fill(~allowed, poison)):
        x = x.requires_grad_()
        log_probs, entropies = from_logits_with_entropy(x, token_ids, kept)
        outcomes.append((log_probs, entropies, *torch.autograd.grad(log_probs.sum() + entropies.sum(), x)))
    for clean, poisoned in zip(*outcomes, strict=True):
        assert torch.equal(clean, poisoned)


def test_in_place_backward_writes_the_same_gradient() -> None:
    hidden, head, token_ids = inputs()
    kept, _ = some_sets(token_ids)
    slopes = [
        torch.autograd.grad(
            from_logits(hidden @ head.T, token_ids, kept, inplace_backward=inplace).sin().sum(), (hidden, head)
        )
        for inplace in (False, True)
    ]
    for got, want in zip(*slopes, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_padded_is_packed() -> None:
    """(B, T) with padding, the valid tokens alone as (N,), and each row by itself."""
    hidden, head, token_ids = inputs()
    kept, _ = some_sets(token_ids)
    mask = torch.tensor([[True] * 4, [True, True, False, False], [True] * 3 + [False]])
    valid = mask.flatten().nonzero()[:, 0]
    logits = (hidden @ head.T).detach()
    padded = from_logits_with_entropy(logits.reshape(3, 4, VOCAB), token_ids.reshape(3, 4), kept)
    packed = from_logits_with_entropy(logits[valid], token_ids[valid], kept.take(valid))
    for wide, narrow in zip(padded, packed, strict=True):
        torch.testing.assert_close(wide[mask], narrow, rtol=1e-12, atol=1e-12)
    for b in range(3):
        tokens = torch.arange(4 * b, 4 * b + 4)
        row = from_logits(logits[tokens], token_ids[tokens], kept.take(tokens))
        torch.testing.assert_close(padded.log_probs[b], row, rtol=1e-12, atol=1e-12)


def test_sets_move_with_their_tokens() -> None:
    """Any rearrangement of the tokens gives the rearranged mask; a token may be taken twice."""
    _, _, token_ids = inputs()
    kept, allowed = some_sets(token_ids)
    assert torch.equal(kept.allowed(VOCAB), allowed)
    for tokens in (torch.randperm(TOKENS), torch.tensor([3, 3, 0]), torch.arange(0), torch.arange(TOKENS)):
        assert torch.equal(kept.take(tokens).allowed(VOCAB), allowed[tokens])
        assert kept.take(tokens).contains(token_ids[tokens]).all()
    assert torch.equal(kept.contains((token_ids + 1) % VOCAB), allowed[torch.arange(TOKENS), (token_ids + 1) % VOCAB])


def test_a_fused_loss_is_the_loss_of_these_log_probs() -> None:
    """Also of tokens outside the mask, whose sets are never read."""
    hidden, head, token_ids = inputs()
    kept, _ = some_sets(token_ids)
    mask = torch.arange(TOKENS) % 4 > 0
    generator = torch.Generator().manual_seed(1)
    a, old = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    log_probs, entropies = from_hidden(hidden, head, token_ids, kept)
    weights = mask / mask.sum()
    per_token = losses.clipped_surrogate(log_probs, old, a, mask, torch.tensor([0, TOKENS]))
    want = torch.autograd.grad((weights * per_token).sum(), (hidden, head))
    strange = torch.where(mask, token_ids, (token_ids + 7) % VOCAB)  # of tokens 0, 4, 8: outside their sets
    assert not kept.contains(strange).all()
    data = {"old_log_probs": old, "advantages": a}
    fused = fused_loss(hidden, head, strange, weights, mask, losses.clipped_surrogate, data, kept)
    torch.testing.assert_close(fused.loss, (weights * per_token).sum(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fused.log_probs, torch.where(mask, log_probs, 0.0).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fused.entropies, torch.where(mask, entropies, 0.0).detach(), rtol=1e-12, atol=1e-12)
    for got, slope in zip(torch.autograd.grad(fused.loss, (hidden, head)), want, strict=True):
        torch.testing.assert_close(got, slope, rtol=1e-12, atol=1e-12)
    again = fused_loss(hidden, head, token_ids, weights, mask, losses.clipped_surrogate, data, everything(TOKENS))
    plain = fused_loss(hidden, head, token_ids, weights, mask, losses.clipped_surrogate, data)
    for got, want_bits in zip(
        (*again, *torch.autograd.grad(again.loss, (hidden, head))),
        (*plain, *torch.autograd.grad(plain.loss, (hidden, head))),
        strict=True,
    ):
        assert torch.equal(got, want_bits)


def test_sets_that_span_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of two tokens give what one tile gives: each has its own part of the sets."""
    _, _, token_ids = inputs()
    kept, _ = some_sets(token_ids)
    want = gradients(by_hidden, kept), gradients(by_logits, kept)
    monkeypatch.setattr("rlprims.kernels.linear_log_probs._CPU_ELEMENTS", 2 * VOCAB)
    monkeypatch.setattr("rlprims.kernels.log_probs._CPU_ELEMENTS", VOCAB)
    for path, whole in zip((by_hidden, by_logits), want, strict=True):
        for got, x in zip(gradients(path, kept), whole, strict=True):
            torch.testing.assert_close(got, x, rtol=1e-12, atol=1e-12)


def test_a_soft_cap_comes_before_the_ban() -> None:
    """c · tanh(−inf / c) would be −c, a token that may be sampled."""
    hidden, head, token_ids = inputs()
    kept, allowed = some_sets(token_ids)
    logits = 2.0 * torch.tanh(hidden @ head.T / 2.0)
    want = logits.masked_fill(~allowed, -torch.inf).log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]
    got = from_hidden(hidden, head, token_ids, kept, soft_cap=2.0).log_probs
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_log_probs_over_kept_sets_under_every_transform_of_torch() -> None:
    hidden, head, token_ids = inputs()
    kept, _ = some_sets(token_ids)
    logits = (hidden @ head.T).detach()

    def total(x: Tensor) -> Tensor:
        log_probs, entropies = from_logits_with_entropy(x, token_ids, kept)
        return (log_probs - 0.3 * entropies).sin().sum()

    x = logits.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(total(x), x)
    torch.testing.assert_close(torch.func.grad(total)(logits), slopes)
    _, moved = torch.func.jvp(total, (logits,), (torch.ones_like(logits),))
    torch.testing.assert_close(moved, slopes.sum())
    models = torch.stack([logits, 2 * logits])
    mapped = torch.func.vmap(lambda x: from_logits(x, token_ids, kept))(models)
    torch.testing.assert_close(mapped[1], from_logits(2 * logits, token_ids, kept))
    hidden_slopes = torch.func.grad(lambda h: from_hidden(h, head, token_ids, kept).log_probs.sum())(hidden)
    (want,) = torch.autograd.grad(from_hidden(hidden, head, token_ids, kept).log_probs.sum(), hidden)
    torch.testing.assert_close(hidden_slopes, want)


@pytest.mark.slow
def test_the_laws_of_transforms(kernels: str) -> None:
    """vmap, compile and export with a dynamic batch, subclasses, and every derivative: sets of two tokens each."""
    only_once(kernels)

    def within(logits: Tensor, responses: Tensor) -> Tensor:
        following = (responses + 1) % logits.shape[-1]
        ids = torch.stack([responses, following], -1).flatten()
        kept = SamplingSupport(ids, 2 * torch.arange(responses.numel() + 1))
        return torch.stack(from_logits_with_entropy(logits, responses, kept))

    check_transforms(within, inputs=("logits",))


@pytest.mark.slow
@pytest.mark.parametrize("path", [by_logits, by_hidden])
def test_one_graph_for_any_batch_and_any_sets(path: Path, kernels: str) -> None:
    only_once(kernels)
    torch.compiler.reset()
    compiled = torch.compile(path, backend="aot_eager", fullgraph=True, dynamic=True)
    sizes = (10, 9, 7)  # none of them is VOCAB − 1: the graph would ask for as many bounds as rows of the head
    for tokens in sizes:
        hidden, head, token_ids = inputs(tokens)
        kept, _ = some_sets(token_ids)
        with torch._dynamo.config.patch(error_on_recompile=tokens != sizes[0]):
            got = compiled(hidden, head, token_ids, kept)
        torch.testing.assert_close(tuple(got), tuple(path(hidden, head, token_ids, kept)), rtol=1e-12, atol=1e-12)
    torch.compiler.reset()


def test_meta_tensors_have_the_shapes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        kept = SamplingSupport(torch.zeros(5, dtype=torch.int32), torch.zeros(7, dtype=torch.int64))
        got = from_logits_with_entropy(torch.zeros(2, 3, VOCAB), torch.zeros(2, 3, dtype=torch.int64), kept)
    assert got.log_probs.shape == got.entropies.shape == (2, 3)


def test_several_tokens_of_a_row_may_be_outside_its_set() -> None:
    """The largest of a teacher, say: the truncated policy cannot draw some of them."""
    kept = SamplingSupport(torch.tensor([0, 1]), torch.tensor([0, 2]))
    got = from_logits(torch.zeros(1, 3), torch.tensor([[0, 2]]), kept)
    assert got[0].tolist() == pytest.approx([-math.log(2), -torch.inf])


@pytest.mark.parametrize("path", [by_logits, by_two_calls, by_hidden])
def test_a_sampled_token_outside_its_set_is_an_error(path: Path) -> None:
    hidden, head, token_ids = inputs()
    kept, _ = some_sets(token_ids)
    token_ids = token_ids.clone()
    token_ids[3] = (token_ids[3] - 1) % VOCAB
    said = rf"token 3 of 12 is {int(token_ids[3])}, expected one of the 3 ids in its kept set; 1 tokens are outside"
    with pytest.raises(ValueError, match=said):
        path(hidden, head, token_ids, kept)


def test_a_wrong_kind_of_sets_is_an_error() -> None:
    logits, token_ids = torch.zeros(2, 3), torch.tensor([0, 0])
    ask = partial(from_logits, logits, token_ids)
    with pytest.raises(ValueError, match=r"expected integers \(K,\) and \(3,\): a set for each of the 2 tokens"):
        ask(SamplingSupport(torch.tensor([0]), torch.tensor([0, 1])))
    with pytest.raises(ValueError, match=r"kept.offsets run from 0 to 2, expected 0 to 1"):
        ask(SamplingSupport(torch.tensor([0]), torch.tensor([0, 1, 2])))
    with pytest.raises(ValueError, match=r"kept.offsets run from 0 to 1, expected 0 to 1, .* never to decrease"):
        from_logits(
            torch.zeros(3, 3), torch.zeros(3).long(), SamplingSupport(torch.tensor([0]), torch.tensor([0, 1, 0, 1]))
        )
    with pytest.raises(ValueError, match=r"kept.ids are in \[-4, 0\]"):
        ask(SamplingSupport(torch.tensor([0, ~3]), torch.tensor([0, 1, 2])))
    with pytest.raises(ValueError, match="expected one kind in each set"):
        ask(SamplingSupport(torch.tensor([0, ~1]), torch.tensor([0, 2, 2])))
    with pytest.raises(ValueError, match=r"kept.ids are in \[0, 3\], expected ids of the 3 logits: \[0, 2\]"):
        ask(SamplingSupport(torch.tensor([0, 3]), torch.tensor([0, 1, 2])))
    with pytest.raises(ValueError, match="expected integers"):
        ask(SamplingSupport(torch.tensor([0.0]), torch.tensor([0, 1, 1])))


def test_the_kept_mass_is_what_the_two_log_probs_differ_by() -> None:
    """π is 1/8, 2/8, 5/8: a set of the first two has 3/8. A token outside its set is counted, and has no part in it."""
    logits = torch.tensor([1.0, 2.0, 5.0]).log().expand(3, 3)
    token_ids, mask = torch.tensor([1, 0, 2]), torch.tensor([[True, True, False]])
    whole = from_logits(logits, token_ids)[None]
    within = from_logits(logits, token_ids, SamplingSupport(torch.tensor([0, 1]), torch.tensor([0, 2, 2, 2])))[None]
    metrics = diagnostics.support_mass(within, whole, mask)
    assert float(metrics["support_mass"].value()) == pytest.approx((3 / 8 + 1) / 2)
    assert float(metrics["outside_support"].value()) == 0
    within = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    metrics = diagnostics.support_mass(within, whole, mask)
    assert float(metrics["support_mass"].value()) == pytest.approx(1 / 8)
    assert float(metrics["outside_support"].value()) == 0.5
