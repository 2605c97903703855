"""Thresholds over ranks are those of the whole step: by counts, and no token is moved."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlprims import filters
from rlprims.testing import on_ranks


@st.composite
def ranks_of_tokens(draw: st.DrawFn) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """How many tokens each rank has, some none; two numbers and a mask of all tokens. Few values, so that many tie."""
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    n = sum(sizes)
    x, y = torch.randn(2, n, generator=generator, dtype=draw(st.sampled_from([torch.float32, torch.float64])))
    if draw(st.booleans()):
        x, y = (2 * x).round() / 2, (2 * y).round() / 2
    valid = torch.rand(n, generator=generator) < draw(st.sampled_from([0.0, 0.1, 0.8, 1.0]))
    return sizes, x, torch.where(valid, y, torch.nan), valid


def parts(x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    return tuple(part[None] for part in x.split(sizes))


SELECTIONS = [
    partial(filters.kl_cov, fraction=0.2),
    partial(filters.high_entropy, fraction=0.3),
    partial(filters.m2po, tau=0.5),
    partial(filters.m2po, tau=0.0),
]


@pytest.mark.parametrize("select", SELECTIONS, ids=lambda f: f"{f.func.__name__}-{f.keywords}")
@settings(max_examples=25, deadline=None)
@given(ranks_of_tokens())
def test_the_tokens_are_those_of_the_whole_step(
    select: Callable[..., Tensor], case: tuple[list[int], Tensor, Tensor, Tensor]
) -> None:
    sizes, x, y, valid = case
    data = [x.double(), y.double()][: 1 if select.func is filters.high_entropy else 2]  # type: ignore[attr-defined]
    want = select(*(d[None] for d in data), valid[None])
    got = on_ranks(
        lambda rank, *part: select(*part, all_reduce=rank.all_reduce), *(parts(d, sizes) for d in (*data, valid))
    )
    assert torch.equal(torch.cat(got, 1), want)


def at_or_above_the_last(x: Tensor, valid: Tensor, count: int) -> Tensor:
    """The count largest valid numbers, by sorting them; NaN is above all numbers, and is not selected."""
    descending = sorted(x[valid].tolist(), key=lambda number: (math.isnan(number), number), reverse=True)
    if len(descending) < count:
        return valid & ~x.isnan()
    return valid & (x >= descending[count - 1])


@settings(max_examples=25, deadline=None)
@given(ranks_of_tokens(), st.sampled_from([0.01, 0.25, 0.5, 0.9]))
def test_the_largest_of_any_float(case: tuple[list[int], Tensor, Tensor, Tensor], fraction: float) -> None:
    """−0.0, infinities, NaN and numbers below the normal ones."""
    sizes, x, _, valid = case
    special = torch.tensor([-0.0, 0.0, torch.inf, -torch.inf, torch.nan, 1e-310])
    numbers = torch.where(x.abs() < 1, special.to(x.dtype)[torch.arange(len(x)) % 6], x)
    count = 1 + int(fraction * max(0, int(valid.sum()) - 1) + 1e-4)
    got = on_ranks(
        lambda rank, n, m: filters.high_entropy(n, m, fraction=fraction, all_reduce=rank.all_reduce),
        parts(numbers, sizes),
        parts(valid, sizes),
    )
    assert torch.equal(torch.cat(got, 1), at_or_above_the_last(numbers, valid, count)[None])


@settings(max_examples=20, deadline=None)
@given(ranks_of_tokens(), st.sampled_from([0.05, 0.5]), st.integers(0, 9))
def test_clip_cov_draws_the_same_tokens(
    case: tuple[list[int], Tensor, Tensor, Tensor], fraction: float, seed: int
) -> None:
    """With the same generator on all ranks, and the number of tokens before each."""
    sizes, x, y, valid = case
    draw = partial(filters.clip_cov, fraction=fraction, low=-1.0, high=2.0)
    whole = torch.Generator().manual_seed(seed)
    want = draw(x.double()[None], y.double()[None], valid[None], generator=whole)
    before = [int(part.sum()) for part in valid.split(sizes)]
    got = on_ranks(
        lambda rank, a, b, m: draw(
            a,
            b,
            m,
            generator=torch.Generator().manual_seed(seed),
            all_reduce=rank.all_reduce,
            tokens_before=sum(before[: rank.index]),
        ),
        *(parts(d, sizes) for d in (x.double(), y.double(), valid)),
    )
    assert torch.equal(torch.cat(got, 1), want)
