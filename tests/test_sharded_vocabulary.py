"""A vocabulary in shards changes nothing: values, and the gradient of each shard, against the whole, in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlprims import losses
from rlprims.logprobs import (
    entropy_from_logits,
    from_hidden,
    from_logits,
    from_logits_with_entropy,
    fused_full_kl,
    fused_loss,
)
from rlprims.testing import Rank, on_ranks
from rlprims.types import SamplingSupport, VocabShard

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def shard_of(rank: Rank, start: int, size: int) -> VocabShard:
    """With a maximum that loses NaN, as those of some backends do."""
    return VocabShard(start, size, rank.all_reduce, lambda x: rank.all_reduce_max(x.masked_fill(x.isnan(), -torch.inf)))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients_of_shards(
    f: Callable[..., tuple[Tensor, ...]], whole: list[Tensor], cut: list[bool], sizes: list[int], dim: int
) -> None:
    """f(*tensors, vocab) gives tensors; those of ``cut`` are cut along ``dim``. Gradients are those of the whole."""

    def run(tensors: list[Tensor], vocab: VocabShard | None) -> tuple[list[Tensor], list[Tensor]]:
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        values = f(*leaves, vocab)
        # a function of the values that is not linear, as a loss of log-probs is
        total = torch.stack([(v.nan_to_num(0, 0, 0).square() / 2 + v.nan_to_num(0, 0, 0)).sum() for v in values]).sum()
        return [v.detach() for v in values], list(torch.autograd.grad(total, leaves))

    def of_rank(rank: Rank, tensors: list[Tensor], start: int) -> tuple[list[Tensor], list[Tensor]]:
        return run(tensors, shard_of(rank, start, sum(sizes)))

    values, gradients = run(whole, None)
    largest = max([1.0, *(float(v.nan_to_num(0, 0, 0).abs().max()) for v in values)])
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    spans = list(zip(starts, sizes, strict=True))
    parts = [[x.narrow(dim, s, n) if c else x for x, c in zip(whole, cut, strict=True)] for s, n in spans]
    for (got_values, got_gradients), start, size in zip(on_ranks(of_rank, parts, starts), starts, sizes, strict=True):
        for got, want in zip(got_values, values, strict=True):
            torch.testing.assert_close(got, want, equal_nan=True, **EXACT)
        for got, want, is_cut in zip(got_gradients, gradients, cut, strict=True):
            want = want.narrow(dim, start, size) if is_cut else want
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12 * largest**2)  # terms of this size cancel


SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=5)


@st.composite
def rows_of_logits(draw: st.DrawFn) -> tuple[list[int], Tensor, Tensor, SamplingSupport | None, float]:
    """Sizes of the shards; logits with banned tokens, one row perhaps NaN; token ids; kept sets; a temperature."""
    sizes = draw(SIZES)
    rows, vocabulary = draw(st.integers(1, 4)), sum(sizes)
    seed = draw(st.integers(0, 2**16))
    logits, ids = 4 * random(rows, vocabulary, seed=seed), torch.arange(rows) * 5 % vocabulary
    banned = random(rows, vocabulary, seed=seed + 1) > draw(st.sampled_from([9.0, 0.5, -9.0]))
    logits = logits.masked_fill(banned.scatter(1, ids[:, None], False), -torch.inf)
    kept = None
    if draw(st.booleans()):
        allowed = (random(rows, vocabulary, seed=seed + 2) > 0).scatter(1, ids[:, None], True)
        allowed[0] = allowed[0] & draw(st.booleans())  # no entry: from the whole vocabulary
        kept = SamplingSupport.from_counts(allowed.nonzero()[:, 1], allowed.sum(1))
    if draw(st.booleans()):
        logits[-1, draw(st.integers(0, vocabulary - 1))] = draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    return sizes, logits, ids, kept, draw(st.sampled_from([1.0, 0.3]))


@settings(max_examples=30, deadline=None)
@given(rows_of_logits())
def test_log_probs_and_entropies_of_logits(
    case: tuple[list[int], Tensor, Tensor, SamplingSupport | None, float],
) -> None:
    sizes, logits, ids, kept, temperature = case

    def both(x: Tensor, vocab: VocabShard | None) -> tuple[Tensor, ...]:
        return from_logits_with_entropy(x, ids, kept, temperature=temperature, vocab=vocab)

    gradients_of_shards(both, [logits], [True], sizes, 1)


@settings(max_examples=10, deadline=None)
@given(SIZES, st.integers(0, 2**16))
def test_several_tokens_of_a_row_and_each_function_alone(sizes: list[int], seed: int) -> None:
    logits = random(3, sum(sizes), seed=seed)
    ids = torch.randint(sum(sizes), (3, 2), generator=torch.Generator().manual_seed(seed))

    def alone(x: Tensor, vocab: VocabShard | None) -> tuple[Tensor, ...]:
        return from_logits(x, ids, vocab=vocab), entropy_from_logits(x, temperature=0.5, vocab=vocab)

    gradients_of_shards(alone, [logits], [True], sizes, 1)


@settings(max_examples=30, deadline=None)
@given(SIZES, st.booleans(), st.sampled_from([None, 2.0]), st.integers(0, 2**16))
def test_hidden_states_and_the_head(sizes: list[int], truncated: bool, soft_cap: float | None, seed: int) -> None:
    """The gradient of the head is the shard's, that of the hidden states the whole one on each rank."""
    vocabulary = sum(sizes)
    hidden, head, ids = random(4, 3, seed=seed), random(vocabulary, 3, seed=seed + 1), torch.arange(4) * 3 % vocabulary
    kept = None
    if truncated:
        allowed = (random(4, vocabulary, seed=seed + 2) > 0).scatter(1, ids[:, None], True)
        kept = SamplingSupport.from_counts(allowed.nonzero()[:, 1], allowed.sum(1))

    def scores(h: Tensor, w: Tensor, vocab: VocabShard | None) -> tuple[Tensor, ...]:
        return from_hidden(h, w, ids, kept, temperature=0.7, soft_cap=soft_cap, vocab=vocab)

    gradients_of_shards(scores, [hidden, head], [False, True], sizes, 0)


@settings(max_examples=10, deadline=None)
@given(SIZES, st.lists(st.booleans(), min_size=6, max_size=6), st.integers(0, 2**16))
def test_the_fused_loss(sizes: list[int], mask: list[bool], seed: int) -> None:
    hidden, head = random(2, 3, 3, seed=seed), random(sum(sizes), 3, seed=seed + 1)
    ids, m = torch.arange(6).reshape(2, 3) * 3 % sum(sizes), torch.tensor(mask).reshape(2, 3)
    data = {"old_log_probs": -torch.ones(2, 3).double(), "advantages": random(2, 3, seed=seed + 2)}

    def scores(h: Tensor, w: Tensor, vocab: VocabShard | None) -> tuple[Tensor, ...]:
        fused = fused_loss(h, w, ids, m / 6, m, losses.clipped_surrogate, data, vocab=vocab)
        return fused.loss, fused.log_probs, fused.entropies

    gradients_of_shards(scores, [hidden, head], [False, True], sizes, 0)


@settings(max_examples=12, deadline=None)
@given(SIZES, st.sampled_from(["reverse", "forward", "jsd"]), st.integers(0, 2**16))
def test_a_divergence_of_two_heads(
    sizes: list[int], divergence: Literal["reverse", "forward", "jsd"], seed: int
) -> None:
    """Both heads are cut at the same ids; the teacher's are constants."""
    hidden, head = random(2, 3, 3, seed=seed), random(sum(sizes), 3, seed=seed + 1)
    teacher, teacher_head = random(2, 3, 2, seed=seed + 2), random(sum(sizes), 2, seed=seed + 3)
    mask = torch.tensor([[True, True, False], [False, True, True]])

    def scores(h: Tensor, w: Tensor, vocab: VocabShard | None) -> tuple[Tensor, ...]:
        rows = teacher_head if vocab is None else teacher_head.narrow(0, vocab.start, len(w))
        options: Any = {"divergence": divergence, "temperature": 0.7, "soft_cap": 2.0, "vocab": vocab}
        return (fused_full_kl(h, w, teacher, rows, mask, **options),)

    gradients_of_shards(scores, [hidden, head], [False, True], sizes, 0)


DIVERGENCES = [
    partial(losses.full_kl, direction="reverse", temperature=0.7),
    partial(losses.full_kl, direction="forward"),
    partial(losses.jsd, beta=0.3),
    partial(losses.jsd, beta=0.9, temperature=2.0),
]


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=lambda f: f"{f.func.__name__}-{f.keywords}")
@settings(max_examples=12, deadline=None)
@given(SIZES, st.lists(st.booleans(), min_size=6, max_size=6), st.sampled_from([1.0, 60.0]), st.integers(0, 2**16))
def test_divergences(
    divergence: Callable[..., Tensor], sizes: list[int], mask: list[bool], spread: float, seed: int
) -> None:
    """At a spread of 60 many log-probs are below −100, where the divergences clamp them. Some tokens are banned."""
    student, teacher = spread * random(2, 3, sum(sizes), seed=seed), spread * random(2, 3, sum(sizes), seed=seed + 1)
    student[0, :, 1:] = student[0, :, 1:].masked_fill(random(3, sum(sizes) - 1, seed=seed) > 1, -torch.inf)
    teacher[1, :, 1:] = teacher[1, :, 1:].masked_fill(random(3, sum(sizes) - 1, seed=seed) > 1, -torch.inf)
    m = torch.tensor(mask).reshape(2, 3)

    def of(x: Tensor, vocab: VocabShard | None) -> tuple[Tensor, ...]:
        part = teacher if vocab is None else teacher[..., vocab.start : vocab.start + x.shape[-1]]
        return (divergence(x, part, m, vocab=vocab),)

    gradients_of_shards(of, [student], [True], sizes, 2)


def test_kl_over_the_teachers_likeliest_tokens() -> None:
    """Log-probs of K ids of the whole vocabulary are the same on all ranks, and topk_kl needs to know of no shard."""
    student, teacher, m = random(2, 2, 9), random(2, 2, 9, seed=1), torch.ones(2, 2, dtype=torch.bool)
    ids = teacher.topk(4).indices
    of_teacher = from_logits(teacher, ids)

    def of(x: Tensor, vocab: VocabShard | None) -> tuple[Tensor, ...]:
        return (losses.topk_kl(from_logits(x, ids, vocab=vocab), of_teacher, m),)

    gradients_of_shards(of, [student], [True], [2, 6, 1], 2)


def test_a_banned_token_that_was_sampled() -> None:
    """Its log-prob is −inf on every rank, and its logit has the gradient that it has of the whole."""
    logits = torch.tensor([[0.0, -torch.inf, 1.0]], dtype=torch.float64)

    def of(x: Tensor, vocab: VocabShard | None) -> tuple[Tensor, ...]:
        return (from_logits(x, torch.tensor([1]), vocab=vocab),)

    def gradient(x: Tensor, vocab: VocabShard | None) -> Tensor:
        x = x.clone().requires_grad_()
        (value,) = of(x, vocab)
        assert value.tolist() == [-torch.inf]
        return torch.autograd.grad(value.sum(), x)[0]

    parts = on_ranks(
        lambda rank, x, start: gradient(x, shard_of(rank, start, 3)), [logits[:, :1], logits[:, 1:]], [0, 1]
    )
    torch.testing.assert_close(torch.cat(parts, 1), gradient(logits, None), **EXACT)


@pytest.mark.parametrize("function", [entropy_from_logits, partial(from_logits, token_ids=torch.tensor([0, 4]))])
def test_float32_from_bfloat16(function: Callable[..., Tensor]) -> None:
    logits = (4 * random(2, 9)).bfloat16()
    parts = on_ranks(
        lambda rank, x, start: function(x, vocab=shard_of(rank, start, 9)), [logits[:, :4], logits[:, 4:]], [0, 4]
    )
    for part in parts:
        assert part.dtype is torch.float32
        torch.testing.assert_close(part.double(), function(logits.double()), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_shard_compiles_in_one_graph() -> None:
    """With sums that are not the identity, so that a graph without them would show."""
    hidden, head, ids = random(3, 4), random(5, 4, seed=1), torch.tensor([2, 4, 0])
    vocab = VocabShard(0, 9, lambda x: 2 * x, lambda x: x + 1)

    def step(compiled: bool) -> tuple[Tensor, ...]:
        def scalar(h: Tensor, w: Tensor) -> Tensor:
            log_probs, entropies = from_hidden(h, w, ids, vocab=vocab)
            return (log_probs + entropies.square()).sum()

        leaves = [x.clone().requires_grad_() for x in (hidden, head)]
        run = torch.compile(scalar, backend="aot_eager", fullgraph=True) if compiled else scalar
        return torch.autograd.grad(run(*leaves), leaves)

    for got, want in zip(step(True), step(False), strict=True):
        torch.testing.assert_close(got, want, **EXACT)


def test_shards_of_a_vocabulary_exchange_numbers_per_token() -> None:
    """Numbers per token, whatever the vocabulary; in backward only gradients of divergences' Z and of hidden states."""
    logits, head, hidden, ids = (
        random(5, 8).requires_grad_(),
        random(8, 3).requires_grad_(),
        random(5, 3),
        torch.arange(5),
    )
    sent: list[int] = []

    def counted(x: Tensor) -> Tensor:
        sent.append(x.numel())
        return x

    vocab = VocabShard(0, 8, counted, counted)
    log_probs, entropies = from_logits_with_entropy(logits, ids, vocab=vocab)
    assert sent == [5] * 4  # the largest logit, Z, the token's logit, Σ p z
    (log_probs + entropies).sum().backward()
    losses.full_kl(logits[None], random(1, 5, 8), torch.ones(1, 5, dtype=torch.bool), vocab=vocab).sum().backward()
    assert set(sent) == {5}
    forward = len(sent)
    from_hidden(hidden, head, ids, vocab=vocab).log_probs.sum().backward()
    assert len(sent) == forward + 4
    from_hidden(hidden.requires_grad_(), head, ids, vocab=vocab).log_probs.sum().backward()
    assert sent[-1] == 15


def test_a_reduction_in_place_changes_no_result() -> None:
    """torch.distributed.all_reduce writes into its argument."""

    def in_place(x: Tensor) -> Tensor:
        return x.mul_(1)

    logits = random(2, 5).requires_grad_()
    got = from_logits_with_entropy(logits, torch.tensor([0, 4]), vocab=VocabShard(0, 5, in_place, in_place))
    torch.testing.assert_close(got, from_logits_with_entropy(logits, torch.tensor([0, 4])), **EXACT)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda v: from_logits(torch.zeros(1, 3), torch.tensor([0]), vocab=v(2, 4)), r"ids \[2, 5\), expected"),
        (lambda v: from_logits(torch.zeros(1, 3), torch.tensor([0]), vocab=v(-1, 4)), "start -1"),
        (lambda v: from_logits(torch.zeros(1, 3), torch.tensor([9]), vocab=v(3, 6)), "not of a shard"),
        (lambda v: entropy_from_logits(torch.zeros(1, 0), vocab=v(0, 6)), "at least one"),
        (lambda v: from_hidden(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]), vocab=v(4, 6)), "size"),
        (lambda v: losses.full_kl(torch.zeros(1, 1, 3), torch.zeros(1, 1, 3), ONE, vocab=v(4, 6)), "size"),
        (lambda v: losses.jsd(torch.zeros(1, 1, 3), torch.zeros(1, 1, 3), ONE, vocab=v(4, 6)), "size"),
    ],
)
def test_shards_that_do_not_fit(call: Callable[[Callable[..., VocabShard]], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(lambda start, size: VocabShard(start, size, torch.clone, torch.clone))


ONE = torch.ones(1, 1, dtype=torch.bool)
