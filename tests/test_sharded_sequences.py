"""Sequences in shards change nothing: losses, weights, aggregations and scans, against the whole, in float64."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlprims import advantage, corrections, layout, losses
from rlprims.scan import discounted_sum
from rlprims.testing import Rank, on_ranks
from rlprims.types import SequenceShard

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def cut_sequences(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[layout.TokenShard], int]:
    """Lengths; a mask of packed tokens; how they are cut over 1 to 4 ranks; a seed."""
    lengths = torch.tensor(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    mask = draw(st.lists(st.booleans(), min_size=int(lengths.sum()), max_size=int(lengths.sum())))
    cut = draw(st.sampled_from(["zigzag", "contiguous"]))
    return (
        lengths,
        torch.tensor(mask, dtype=torch.bool),
        layout.shards(lengths, draw(st.integers(1, 4)), cut),
        draw(st.integers(0, 2**16)),
    )


def borders(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


SEQUENCE_LOSSES = [
    partial(losses.gspo, clip_low=0.2, clip_high=0.2),
    partial(losses.gspo, mean="product", clip_low=0.5, clip_high=0.5),
    partial(losses.gspo_token, clip_low=0.2, clip_high=0.2),
    losses.gmpo,
    losses.opmd,
    losses.topr,
    losses.vespo,
]
AGGREGATIONS = {
    "token_mean": losses.token_mean,
    "seq_mean_token_sum": losses.seq_mean_token_sum,
    "seq_mean_token_mean": losses.seq_mean_token_mean,
}


def name_of(f: Any) -> str:
    return f"{f.func.__name__}-{f.keywords}" if isinstance(f, partial) else f.__name__


@pytest.mark.parametrize("loss", SEQUENCE_LOSSES, ids=name_of)
@settings(max_examples=8, deadline=None)
@given(cut_sequences(), st.sampled_from(sorted(AGGREGATIONS)))
def test_losses_of_whole_sequences(
    loss: Callable[..., Tensor], case: tuple[Tensor, Tensor, list[layout.TokenShard], int], how: str
) -> None:
    """Per token, its scalar summed over the ranks, and the gradient of each rank's log-probs."""
    lengths, mask, parts, seed = case
    new, old, a = (
        0.3 * random(len(mask), seed=seed),
        0.3 * random(len(mask), seed=seed + 1),
        random(len(mask), seed=seed),
    )

    def step(
        new: Tensor, old: Tensor, a: Tensor, m: Tensor, cu_seqlens: Tensor, rank: Rank | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        options: dict[str, Any] = {} if rank is None else {"all_reduce_rows": rank.all_reduce}
        new = new.clone().requires_grad_()
        per_token = loss(new, old, a, m, cu_seqlens, **options)
        totals = losses.count_totals(m, cu_seqlens, **options)
        if how == "seq_mean_token_mean":
            row_tokens = layout.sequence_lengths(m, cu_seqlens, **options)
            scalar = losses.seq_mean_token_mean(per_token, m, cu_seqlens, totals, row_tokens)
        else:
            scalar = AGGREGATIONS[how](per_token, m, cu_seqlens, totals)
        return per_token.detach(), scalar.detach(), torch.autograd.grad(scalar, new)[0]

    per_token, scalar, gradient = step(new, old, a, mask, borders(lengths), None)
    per_rank = [layout.cut_shards(x, parts) for x in (new, old, a, mask)]
    found = on_ranks(lambda rank, *data: step(*data, rank), *per_rank, [part.cu_seqlens for part in parts])
    torch.testing.assert_close(layout.join_shards([x for x, _, _ in found], parts), per_token, **EXACT)
    torch.testing.assert_close(torch.stack([x for _, x, _ in found]).sum(), scalar, **EXACT)
    torch.testing.assert_close(layout.join_shards([x for _, _, x in found], parts), gradient, **EXACT)


@pytest.mark.parametrize("loss", SEQUENCE_LOSSES[:4], ids=name_of)
def test_a_token_that_the_policy_excludes(loss: Callable[..., Tensor]) -> None:
    """Its log-prob is −inf: the sequence's ratio is the least there is, on both ranks, and no gradient is NaN."""
    new = torch.tensor([[-1.0, -torch.inf, -1.0, -1.5], [-1.0, -1.0, -1.2, -1.0]], dtype=torch.float64)
    old, a, mask = new.clamp(min=-2) - 0.05, random(2, 4), torch.ones(2, 4, dtype=torch.bool)

    def step(columns: slice, **options: Any) -> tuple[Tensor, Tensor]:
        x = new[:, columns].clone().requires_grad_()
        per_token = loss(x, old[:, columns], a[:, columns], mask[:, columns], **options)
        return per_token.detach(), torch.autograd.grad(per_token.sum(), x)[0]

    per_token, gradient = step(slice(0, 4))
    found = on_ranks(lambda rank, s: step(s, all_reduce_rows=rank.all_reduce), [slice(0, 3), slice(3, 4)])
    torch.testing.assert_close(torch.cat([x for x, _ in found], 1), per_token, **EXACT)
    torch.testing.assert_close(torch.cat([x for _, x in found], 1), gradient, **EXACT)
    assert gradient.isfinite().all()


SEQUENCE_WEIGHTS = [
    partial(corrections.importance_weights, level="sequence"),
    partial(corrections.importance_weights, level="sequence", mean="geometric", action="mask", low=0.9, high=1.1),
    partial(corrections.rejection, high=0.05),
    partial(corrections.rejection, estimator="k2", statistic="sum", high=0.2),
    partial(corrections.geometric_gate, low=0.9, high=1.1),
    partial(corrections.seq_mask_tis, low=0.9, high=1.1),
    partial(corrections.mis, high=1.2),
    partial(corrections.token_veto, low=0.6, high=1.6),
]


@pytest.mark.parametrize("weights", SEQUENCE_WEIGHTS, ids=name_of)
@settings(max_examples=5, deadline=None)
@given(cut_sequences())
def test_weights_of_whole_sequences(
    weights: Callable[..., corrections.Weights], case: tuple[Tensor, Tensor, list[layout.TokenShard], int]
) -> None:
    lengths, mask, parts, seed = case
    old, rollout = 0.2 * random(len(mask), seed=seed), 0.2 * random(len(mask), seed=seed + 1)
    want = weights(old, rollout, mask, borders(lengths)).values
    got = on_ranks(
        lambda rank, *data: weights(*data, all_reduce_rows=rank.all_reduce).values,
        *(layout.cut_shards(x, parts) for x in (old, rollout, mask)),
        [part.cu_seqlens for part in parts],
    )
    torch.testing.assert_close(layout.join_shards(got, parts), want, **EXACT)


@settings(max_examples=8, deadline=None)
@given(cut_sequences(), st.sampled_from([0.0, 0.1]))
def test_opsm(case: tuple[Tensor, Tensor, list[layout.TokenShard], int], delta: float) -> None:
    lengths, mask, parts, seed = case
    data = [0.2 * random(len(mask), seed=seed + i) for i in range(3)]
    want = corrections.opsm(*data, mask, borders(lengths), delta=delta).values
    got = on_ranks(
        lambda rank, *part: corrections.opsm(*part, delta=delta, all_reduce_rows=rank.all_reduce).values,
        *(layout.cut_shards(x, parts) for x in (*data, mask)),
        [part.cu_seqlens for part in parts],
    )
    torch.testing.assert_close(layout.join_shards(got, parts), want, **EXACT)


def test_segments_of_cut_sequences_are_refused() -> None:
    x, m = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    for function in (corrections.importance_weights, corrections.rejection):
        with pytest.raises(ValueError, match="'segment' with all_reduce_rows, expected 'token' or 'sequence'"):
            function(x, x, m, level="segment", all_reduce_rows=torch.clone)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [losses.gspo, losses.opmd], ids=name_of)
def test_a_loss_of_cut_sequences_compiles_in_one_graph(loss: Callable[..., Tensor]) -> None:
    """The sum of the gradient in backward is part of the graph."""
    new, old, a, mask = *random(3, 2, 4), torch.ones(2, 4, dtype=torch.bool)

    def step(x: Tensor, compiled: bool) -> Tensor:
        def scalar(x: Tensor) -> Tensor:
            return loss(x, old, a, mask, all_reduce_rows=lambda s: 2 * s).sum()

        x = x.clone().requires_grad_()
        run = torch.compile(scalar, backend="aot_eager", fullgraph=True) if compiled else scalar
        return torch.autograd.grad(run(x), x)[0]

    torch.testing.assert_close(step(0.001 * new, True), step(0.001 * new, False), **EXACT)


# Estimators over parts that follow each other.


def estimators(turns: bool) -> list[Callable[..., Tensor]]:
    """Of (rewards, values, old, rollout, turn_ids, mask, cu_seqlens, bootstrap), with ``shard``."""

    def returns(r: Tensor, v: Tensor, o: Tensor, b: Tensor, t: Tensor, m: Tensor, *rest: Tensor, **kw: Any) -> Tensor:
        return advantage.discounted_returns(r, m, *rest, t if turns else None, gamma=0.9, **kw)

    def of_critic(f: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
        def call(r: Tensor, v: Tensor, o: Tensor, b: Tensor, t: Tensor, m: Tensor, *rest: Tensor, **kw: Any) -> Tensor:
            return f(r, v, m, *rest, **options, **kw)

        return call

    def vtrace(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(r: Tensor, v: Tensor, o: Tensor, b: Tensor, t: Tensor, m: Tensor, *rest: Tensor, **kw: Any) -> Tensor:
            return f(r, v, o, b, m, *rest, gamma=0.9, lam=0.8, **kw)

        return call

    return [
        returns,
        of_critic(advantage.gae, gamma=0.9, lam=0.7),
        of_critic(advantage.gae, gamma=1.0, lam=0.0),
        of_critic(advantage.td_lambda, gamma=0.9, lam=0.5),
        of_critic(advantage.length_adaptive_gae, gamma=0.9, alpha=0.5),
        vtrace(advantage.vtrace),
        vtrace(advantage.vtrace_returns),
    ]


@st.composite
def parts_in_order(draw: st.DrawFn) -> tuple[list[list[int]], Tensor, Tensor, int]:
    """Lengths of the parts of each sequence on each rank; mask and turn ids of the packed whole; a seed."""
    ranks, rows = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    sizes = [[draw(st.integers(0, 4)) for _ in range(rows)] for _ in range(ranks)]
    total = sum(map(sum, sizes))
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=total, max_size=total)), dtype=torch.bool)
    turns = torch.tensor(draw(st.lists(st.integers(0, 1), min_size=total, max_size=total)), dtype=torch.int64)
    return sizes, mask, turns, draw(st.integers(0, 2**16))


def parts_of(sizes: list[list[int]]) -> tuple[Tensor, list[layout.TokenShard]]:
    """The borders of the whole, and which of its tokens each rank has."""
    per_rank = torch.tensor(sizes)
    lengths = per_rank.sum(0)
    starts = (lengths.cumsum(0) - lengths) + per_rank.cumsum(0) - per_rank
    tokens = [
        torch.cat([torch.arange(s, s + n) for s, n in zip(start.tolist(), size.tolist(), strict=True)])
        for start, size in zip(starts, per_rank, strict=True)
    ]
    return borders(lengths), [
        layout.TokenShard(index, borders(size)) for index, size in zip(tokens, per_rank, strict=True)
    ]


@pytest.mark.parametrize("turns", [False, True])
@settings(max_examples=12, deadline=None)
@given(parts_in_order(), st.booleans())
def test_scans_over_parts(turns: bool, case: tuple[list[list[int]], Tensor, Tensor, int], bootstrap: bool) -> None:
    sizes, mask, turn_ids, seed = case
    cu_seqlens, parts = parts_of(sizes)
    data = [random(len(mask), seed=seed + i) for i in range(4)]
    data = [torch.where(mask, x, torch.nan) for x in data]
    beyond = random(len(sizes[0]), seed=seed) if bootstrap else None
    for estimate in estimators(turns)[: 1 if turns else None]:
        want = estimate(*data, turn_ids, mask, cu_seqlens, beyond)
        got = on_ranks(
            lambda rank, *part, f=estimate: f(*part, beyond, shard=SequenceShard(rank.index, rank.all_gather)),
            *(layout.cut_shards(x, parts) for x in (*data, turn_ids, mask)),
            [part.cu_seqlens for part in parts],
        )
        torch.testing.assert_close(layout.join_shards(got, parts), want, **EXACT)


def test_parts_keep_their_dtype() -> None:
    _, parts = parts_of([[2], [2]])
    got = on_ranks(
        lambda rank, x, m, cu: discounted_sum(x, 0.5, m, cu, SequenceShard(rank.index, rank.all_gather)),
        *(layout.cut_shards(x, parts) for x in (torch.ones(4), torch.ones(4, dtype=torch.bool))),
        [part.cu_seqlens for part in parts],
    )
    assert torch.cat(got).tolist() == [1.875, 1.75, 1.5, 1.0]
    assert {x.dtype for x in got} == {torch.float32}


@pytest.mark.parametrize("cuts", [[], [3], [1, 1, 4], [0, 6], [2, 4, 6]])
def test_padded_parts(cuts: list[int]) -> None:
    """Columns of (B, T), some parts without any; a row without a valid token in one part, and one without any."""
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0]]).bool()
    data, beyond = [random(4, 6, seed=i) for i in range(4)], random(4, seed=9)
    turn_ids = torch.tensor([[0, 0, 1, 1, 1, 2]] * 4)
    edges = [0, *cuts, 6]
    spans = [slice(a, b) for a, b in itertools.pairwise(edges)]
    for turns in (False, True):
        for estimate in estimators(turns)[: 1 if turns else None]:
            want = estimate(*data, turn_ids, mask, None, beyond)
            got = on_ranks(
                lambda rank, span, f=estimate: f(
                    *(x[:, span] for x in (*data, turn_ids, mask)),
                    None,
                    beyond,
                    shard=SequenceShard(rank.index, rank.all_gather),
                ),
                spans,
            )
            torch.testing.assert_close(torch.cat(got, 1), want, **EXACT)


# How sequences are cut.


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 20), max_size=5), st.integers(1, 5), st.sampled_from(["zigzag", "contiguous"]))
def test_every_token_is_on_one_rank(lengths: list[int], ranks: int, cut: layout.Cut) -> None:
    parts = layout.shards(torch.tensor(lengths, dtype=torch.int64), ranks, cut)
    x = random(sum(lengths), 2)
    pieces = layout.cut_shards(x, parts)
    assert torch.equal(layout.join_shards(pieces, parts), x)
    assert len(parts) == ranks
    for part in parts:
        assert part.cu_seqlens[-1] == len(part.tokens)
        whole = borders(torch.tensor(lengths, dtype=torch.int64))
        of_part = layout.sequence_ids(part.cu_seqlens, len(part.tokens))
        assert torch.equal(of_part, layout.sequence_ids(whole, len(x))[part.tokens])


def test_zigzag_gives_all_ranks_equal_work() -> None:
    """Under a causal mask token t looks at t + 1 tokens."""
    work = [int((part.tokens + 1).sum()) for part in layout.shards(torch.tensor([64]), 4)]
    assert len(set(work)) == 1
    contiguous = [int((part.tokens + 1).sum()) for part in layout.shards(torch.tensor([64]), 4, "contiguous")]
    assert contiguous[-1] > 6 * contiguous[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layout.shards(torch.tensor([4]), 0), "ranks=0"),
        (lambda: layout.shards(torch.tensor([4.0]), 2), "expected integers"),
        (lambda: layout.shards(torch.tensor([4]), 2, "ring"), "layout='ring'"),  # type: ignore[arg-type]
        (
            lambda: layout.join_shards([torch.zeros(4)], layout.shards(torch.tensor([4]), 2)),
            r"\[4\] tokens, expected \[2, 2\]",
        ),
    ],
)
def test_cuts_that_are_none(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
