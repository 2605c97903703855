"""What takes another way for large or ordered input gives the same numbers."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rlprims.advantage import discounted_returns, gae, grpo, pass_at_k, remax, rloo, vtrace, whiten
from rlprims.diagnostics import policy_update
from rlprims.grouping import (
    dense_ids,
    group_bounds,
    group_centred,
    group_count,
    group_mean,
    group_std,
    is_constant,
    is_varied,
)
from rlprims.losses import clipped_surrogate, token_sum
from rlprims.masking import zero_outside

SHAPE = (100, 90)  # beyond the size at which torch.where is used


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_large_selection_is_where_to_the_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(SHAPE, generator=generator) < 0.5
    x = torch.where(mask, torch.randn(SHAPE, generator=generator), torch.nan).to(dtype).requires_grad_()
    upstream = torch.where(mask, torch.randn(SHAPE, generator=generator), torch.inf)
    got, want = zero_outside(x, mask), torch.where(mask, x.to(torch.promote_types(dtype, torch.float32)), 0.0)
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(y, x, upstream.to(y.dtype))[0] for y in (got, want)))


def test_only_the_same_unchanged_mask_is_not_selected_by_again() -> None:
    log_probs = torch.zeros(SHAPE, requires_grad=True)
    mask = torch.ones(SHAPE, dtype=torch.bool)
    losses = clipped_surrogate(log_probs, torch.zeros(SHAPE), torch.ones(SHAPE), mask)
    assert zero_outside(losses, mask) is losses
    assert zero_outside(losses * 1, mask) is not losses
    mask[0] = False
    assert token_sum(losses, mask).item() == -99 * 90


@pytest.mark.parametrize("shape", [(3, 7), (1030, 300)])
@pytest.mark.parametrize("shift", [0.0, -30.0])  # every ratio below 1: the largest is not that of a masked token
def test_the_metrics_of_an_update_are_those_of_its_valid_tokens(shape: tuple[int, int], shift: float) -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs, old, advantages = (torch.randn(shape, generator=generator).double() for _ in range(3))
    log_probs += shift
    mask = torch.rand(shape, generator=generator) < 0.7
    poisoned = (torch.where(mask, x, torch.nan).float() for x in (log_probs, old, advantages))
    got = policy_update(*poisoned, mask, clip_low=0.2, clip_high=0.28)
    x, a = (log_probs - old).clamp(-20, 20)[mask], advantages[mask]
    below, above = x.exp() < 0.8, x.exp() > 1.28
    want = {
        "approx_kl": x.expm1() - x,
        "clip_fraction_low": (below & (a < 0)).double(),
        "clip_fraction_high": (above & (a > 0)).double(),
        "outside_fraction_low": (below & (a > 0)).double(),
        "outside_fraction_high": (above & (a < 0)).double(),
    }
    assert got.keys() == want.keys() | {"ratio_max"}
    for name, each in want.items():
        assert got[name].value().item() == pytest.approx(each.mean().item(), rel=1e-6, abs=1e-9)
    assert got["ratio_max"].value().item() == pytest.approx(x.exp().max().item(), rel=1e-6)


def test_on_a_bound_of_the_ratio_the_gradient_passes_and_beyond_it_does_not() -> None:
    log_probs = torch.tensor([20.0, 20.001, -20.0, -20.001]).repeat(2000)[None].requires_grad_()
    ones = torch.ones_like(log_probs, dtype=torch.bool)
    for sign, free in ((-1.0, [True, False, False, False]), (1.0, [False, False, True, False])):
        losses = clipped_surrogate(log_probs, torch.zeros_like(ones).float(), sign * ones.float(), ones)
        (slope,) = torch.autograd.grad(losses.sum(), log_probs)
        assert slope[0, :4].ne(0).tolist() == free
        assert torch.equal(losses[0, :4].detach()[slope[0, :4].ne(0)], slope[0, :4][slope[0, :4].ne(0)])


def statistics(x: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return (
        group_count(ids, valid),
        *group_bounds(x, ids, valid),
        group_mean(x, ids, valid),
        group_centred(x, ids, valid),
        group_std(x, ids, valid),
        is_constant(x, ids, valid),
        is_varied(x, ids, valid),
    )


@pytest.mark.parametrize("groups", [4, 1000])  # by one of numpy's loops over the rows, and as the columns of a table
@pytest.mark.parametrize("some_valid", [False, True])
def test_groups_have_the_same_statistics_in_every_layout(groups: int, some_valid: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = 4 * groups
    x = torch.randn(rows, generator=generator, dtype=torch.float64)
    x[:4], x[5], x[9] = 0.1, torch.nan, torch.inf
    ids = torch.arange(groups).repeat_interleave(4)
    valid = torch.rand(rows, generator=generator) < 0.7 if some_valid else None
    shuffled = torch.randperm(rows, generator=generator)
    in_order = statistics(x, ids, valid)
    moved = statistics(x[shuffled], ids[shuffled], None if valid is None else valid[shuffled])
    in_torch = statistics(x.clone().requires_grad_(), ids, valid)
    for table, scattered, differentiable in zip(in_order, moved, in_torch, strict=True):
        assert not table.requires_grad
        for got, want in ((scattered, table[shuffled]), (differentiable, table)):
            torch.testing.assert_close(got.detach(), want, rtol=0, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hard", ["", "narrow", "nan", "huge"])
@pytest.mark.parametrize("groups", [4, 1000])
def test_advantages_of_groups_in_every_layout(groups: int, hard: str, dtype: torch.dtype) -> None:
    """Whether a group is constant its squares say, unless it is narrow, has a NaN, or a number is huge."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(groups, 4, generator=generator, dtype=dtype)
    x[0], x[1] = 0.1, 1000.1
    silent = torch.zeros(groups, dtype=torch.bool)
    silent[:2] = True
    if hard == "narrow":
        x[2] = torch.tensor([0.5, 0.5, 0.5, 0.5 + 1e-7])
        x[3] = torch.tensor([0.5, 0.5, 0.5, 0.5 + 4e-6])
        silent[2] = True
    elif hard:
        x[2, 3] = torch.nan if hard == "nan" else 1e9
    ids = torch.arange(groups).repeat_interleave(4)
    order = torch.randperm(len(ids), generator=generator)
    column, mask = x.reshape(-1, 1), torch.ones(len(ids), 1, dtype=torch.bool)
    in_order, shuffled = grpo(column, ids, mask), grpo(column[order], ids[order], mask)
    in_torch = grpo(column.clone().requires_grad_(), ids, mask).detach()
    assert torch.equal((in_order == 0).reshape(groups, 4).all(1), silent)
    for got, want in ((shuffled, in_order[order]), (in_torch, in_order)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("estimator", [grpo, rloo, pass_at_k])
def test_a_token_is_a_response(estimator: Callable[..., torch.Tensor]) -> None:
    """One valid token in each row is not selected from and not spread; with a column that is padding it is."""
    generator = torch.Generator().manual_seed(0)
    rewards, ids = torch.rand(6, 1, generator=generator, dtype=torch.bfloat16), torch.tensor([0, 1, 0, 1, 0, 0])
    mask, given = torch.ones(6, 1, dtype=torch.bool), rewards.clone()
    got = estimator(rewards, ids, mask)
    padded = estimator(torch.cat((rewards, rewards / 0), 1), ids, torch.cat((mask, ~mask), 1))
    assert torch.equal(padded[:, :1], got)
    got += 1
    assert torch.equal(rewards, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_remax_with_a_gradient_and_without(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(SHAPE, generator=generator, dtype=dtype)
    mask, greedy = torch.rand(SHAPE, generator=generator) < 0.7, torch.rand(SHAPE[0], generator=generator, dtype=dtype)
    rewards[~mask] = torch.nan
    got, slow = remax(rewards, greedy, mask), remax(rewards, greedy.clone().requires_grad_(), mask)
    assert torch.equal(got, slow.detach())
    assert not got[~mask].any()


def test_labels_in_runs_are_named_as_labels_that_are_not() -> None:
    names: list[object] = ["a", "b", ("c", 1), 2**70, None, 1.5]
    runs = [name for name in names for _ in range(5)]
    for labels in (runs, np.fromiter(runs, object), np.fromiter(2 * runs, object)[::2]):
        want: dict[object, int] = {}
        assert dense_ids(labels).tolist() == [want.setdefault(name, len(want)) for name in labels]
    equal = [bytes([65, i // 4]).decode() for i in range(8)]  # equal, and no two the same object
    assert equal[0] is not equal[1]
    assert dense_ids(equal).tolist() == [0] * 4 + [1] * 4
    with pytest.raises(ValueError, match="NaN"):
        dense_ids([float("nan")] * 3)


@pytest.mark.parametrize("labels", [[3, 3, 7, 7, 7, 9], [7, 3, 7, 9, 3, 7], [2**62, 0, 2**62, -1], [-5, 4, -5, 4]])
@pytest.mark.parametrize("dtype", [np.int64, np.float64, object])
def test_integers_are_names_too(labels: list[int], dtype: type) -> None:
    want: dict[int, int] = {}
    assert dense_ids(np.array(labels, dtype)).tolist() == [want.setdefault(name, len(want)) for name in labels]


BY_TOKENS = {
    "gae": lambda r, v, p, m, cu, start: gae(r, v, m, cu, start),
    "discounted_returns": lambda r, v, p, m, cu, start: discounted_returns(r, m, cu, start, gamma=0.9),
    "vtrace": lambda r, v, p, m, cu, start: vtrace(r, v, p, 0.9 * p, m, cu, start),
    "whiten": lambda r, v, p, m, cu, start: whiten(r, m, cu),
}


@pytest.mark.parametrize("name", BY_TOKENS)
@pytest.mark.parametrize("width", [5000, 2**18 + 5], ids=["rows in a block", "a row is a block"])
def test_a_batch_of_several_blocks(name: str, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = 2**19 // width + 2
    r, v, p = torch.randn(3, rows, width, generator=generator)
    mask = torch.arange(width) < torch.tensor([width, width // 3, 0]).repeat(rows)[:rows, None]
    start = torch.randn(rows, generator=generator)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)])
    padded = BY_TOKENS[name](r, v, p, mask, None, start)
    packed = BY_TOKENS[name](r[mask], v[mask], p[mask], mask[mask], cu, start)
    torch.testing.assert_close(packed, padded[mask], rtol=1e-5, atol=1e-4)
    assert not padded[~mask].any()
    if name != "whiten":
        row = slice(1, 2)
        alone = BY_TOKENS[name](r[row], v[row], p[row], mask[row], None, start[row])
        torch.testing.assert_close(padded[row], alone, rtol=1e-5, atol=1e-4)


def test_the_gradient_passes_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 30_000, generator=generator, dtype=torch.float64)
    mask = torch.rand(x.shape, generator=generator) < 0.9
    slopes = []
    for way in (lambda x: whiten(gae(x, 0.5 * x, mask), mask), lambda x: _in_one(x, mask)):
        leaf = x.clone().requires_grad_()
        way(leaf).pow(3).sum().backward()
        slopes.append(leaf.grad)
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-9)


def _in_one(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    a = torch.cat([gae(x_i[None], 0.5 * x_i[None], m_i[None]) for x_i, m_i in zip(x, mask, strict=True)])
    n, kept = mask.sum(), torch.where(mask, a, 0.0)
    centred = torch.where(mask, kept - kept.sum() / n, 0.0)
    return centred / (centred.square().sum() / (n - 1) + 1e-8).sqrt()
