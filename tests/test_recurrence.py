"""The linear recurrence against the loop that it replaces."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlprims import _recurrence_cpu
from rlprims.advantage import gae
from rlprims.recurrence import reverse_recurrence, skipping_recurrence

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def loop(a: torch.Tensor, b: torch.Tensor, initial: float) -> tuple[list[float], list[float]]:
    solved, received, carry = [], [], initial
    for x, y in zip(reversed(a.tolist()), reversed(b.tolist()), strict=True):
        received.append(carry)
        carry = x * carry + y
        solved.append(carry)
    return solved[::-1], received[::-1]


@settings(max_examples=25)
@given(st.lists(st.integers(0, 25), min_size=1, max_size=3), st.booleans(), st.integers(0, 2**31))
def test_packed_and_padded_against_a_loop(lengths: list[int], gradient: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, sum(lengths), generator=generator, dtype=torch.float64)
    initial = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    b.requires_grad_(gradient)  # the readable way; without, the one in place
    solved, received = (x.detach() for x in reverse_recurrence(a, b, initial, torch.tensor([0, *lengths]).cumsum(0)))
    pieces = zip(
        a.split(lengths), b.split(lengths), initial, solved.split(lengths), received.split(lengths), strict=True
    )
    for a_i, b_i, start, solved_i, received_i in pieces:
        want = torch.tensor(loop(a_i, b_i, float(start)), dtype=torch.float64).reshape(2, -1)
        torch.testing.assert_close(torch.stack([solved_i, received_i]), want, **CLOSE)
        alone = reverse_recurrence(a_i[None], b_i[None], start[None])
        torch.testing.assert_close(torch.cat(alone).detach(), want, **CLOSE)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=4),
    st.sampled_from([0.0, 1e-200, 0.5, 0.95, 1.0, 1.1]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_masked_tokens_are_skipped(
    runs: list[tuple[int, bool]], discount: float, starts: bool, each: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.cat([torch.full((n,), valid) for n, valid in runs])
    mask = torch.stack([mask, mask.flip(0), torch.ones_like(mask), torch.zeros_like(mask)])
    b = torch.where(mask, torch.randn(mask.shape, generator=generator, dtype=torch.float64), 0.0)
    initial = torch.randn(4, generator=generator, dtype=torch.float64) if starts else None
    discounts = torch.full_like(b, discount).masked_fill(~mask, torch.nan) if each else discount
    for rows in (slice(0, 4), slice(2, 4)):  # of any masks; of one run in each row
        given_each = discounts[rows] if isinstance(discounts, torch.Tensor) else discounts
        start = None if initial is None else initial[rows]
        padded = skipping_recurrence(given_each, b[rows], mask[rows], start)
        cu = torch.arange(len(mask[rows]) + 1) * mask.shape[1]
        flat = given_each.flatten() if isinstance(given_each, torch.Tensor) else given_each
        packed = skipping_recurrence(flat, b[rows].flatten(), mask[rows].flatten(), start, cu)
        for i, (b_i, m) in enumerate(zip(b[rows], mask[rows], strict=True)):
            alone = torch.full_like(b_i[m], discount)
            want = torch.tensor(loop(alone, b_i[m], 0.0 if start is None else float(start[i])), dtype=b.dtype)
            for got in (padded, [x.view_as(b[rows]) for x in packed]):
                torch.testing.assert_close(torch.stack([x[i][m] for x in got]), want.reshape(2, -1), **CLOSE)


MASKS = {
    "dense": lambda shape: torch.ones(shape, dtype=torch.bool),
    "one run": lambda shape: (
        torch.arange(shape[1]) % (shape[1] // 2 + 1) < torch.tensor([9, 0, shape[1] // 3])[:, None]
    ),
    "holes": lambda shape: torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.8,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("discount", [1e-30, 0.3, 0.5, 0.95, 0.9999])
@pytest.mark.parametrize("starts", [False, True])
def test_wide_rows_by_products_and_without(
    mask: str, discount: float, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    for length in (15, 16, 126, 127, 128, 400, 2047, 2100):
        valid = MASKS[mask]((3, length))
        b = torch.where(valid, torch.randn(3, length, generator=generator, dtype=torch.float64), 0.0)
        initial = torch.randn(3, generator=generator, dtype=torch.float64) if starts else None
        readable = skipping_recurrence(discount, b.clone().requires_grad_(), valid, initial)
        want = torch.stack(readable).detach()[:, valid]
        got = torch.stack(skipping_recurrence(discount, b, valid, initial))[:, valid]
        torch.testing.assert_close(got, want, **CLOSE)
        with monkeypatch.context() as without:
            without.setattr(_recurrence_cpu, "_products_are_exact", lambda dtype: False)
            got = torch.stack(skipping_recurrence(discount, b, valid, initial))[:, valid]
            torch.testing.assert_close(got, want, **CLOSE)


def test_no_rows() -> None:
    nothing = torch.zeros(0, 400)
    assert [x.shape for x in skipping_recurrence(0.9, nothing, nothing.bool())] == [(0, 400)] * 2


@pytest.mark.parametrize("holes", [False, True])
def test_no_product_in_fewer_bits(holes: bool) -> None:
    mask = MASKS["holes" if holes else "dense"]((3, 400))
    b = torch.where(mask, torch.randn(3, 400, generator=torch.Generator().manual_seed(0)), 0.0)
    want, _ = skipping_recurrence(0.95, b, mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(skipping_recurrence(0.95, b, mask)[0], want)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert not _recurrence_cpu._products_are_exact(torch.float32)
        torch.testing.assert_close(skipping_recurrence(0.95, b, mask)[0][mask], want[mask], rtol=1e-6, atol=1e-5)
    finally:
        torch.set_float32_matmul_precision(before)
    assert _recurrence_cpu._products_are_exact(torch.float32)


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_what_is_not_finite_stays_in_its_row_and_to_the_left(holes: bool, number: float) -> None:
    mask = MASKS["holes" if holes else "dense"]((3, 400))
    b = torch.where(mask, torch.randn(3, 400, generator=torch.Generator().manual_seed(0)), 0.0)
    clean, _ = skipping_recurrence(0.5, b, mask)
    mask[1, 200], b[1, 200] = True, number
    got, _ = skipping_recurrence(0.5, b, mask)
    others = torch.tensor([True, False, True])[:, None] & mask
    assert torch.equal(got[others], clean[others]), "to the bit"
    right = mask[1, 201:]
    torch.testing.assert_close(got[1, 201:][right], clean[1, 201:][right], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1, 200], b[1, 200], equal_nan=True)
    assert got.isfinite().all() == (number == 3e38)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95)])
@pytest.mark.parametrize("holes", [False, True])
def test_a_long_response_in_float32(gamma: float, lam: float, holes: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    r, v = torch.randn(2, 2, 32768, generator=generator)
    mask = torch.rand(2, 4096, generator=generator).repeat_interleave(8, 1) < (0.9 if holes else 1.0)
    want = gae(r.double(), v.double(), mask, gamma=gamma, lam=lam)
    assert (gae(r, v, mask, gamma=gamma, lam=lam) - want).abs().max() <= 1e-6 * want.abs().max()


def test_a_nan_stays_in_its_sequence_and_to_the_left() -> None:
    b = torch.arange(15.0)
    cu, initial = torch.tensor([0, 4, 4, 11, 15]), torch.tensor([0.1, torch.nan, 0.2, 0.3])
    clean, _ = reverse_recurrence(torch.full((15,), 0.3), b, initial, cu)
    b[9] = torch.nan
    solved, _ = reverse_recurrence(torch.full((15,), 0.3), b, initial, cu)
    assert solved.isnan().nonzero().flatten().tolist() == list(range(4, 10))
    assert torch.equal(solved[~solved.isnan()], clean[~solved.isnan()]), "to the bit"
