"""The reverse scan and the sums made of it, against a plain loop."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.export import Dim, export

from rlprims.advantage import discounted_returns, gae, reinforce_pp, td_lambda, vtrace
from rlprims.scan import discounted_sum, next_values, reverse_scan, sum_from_right

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
LENGTHS = st.lists(st.integers(0, 25), min_size=1, max_size=4)
WIDTHS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 127, 128, 129]


def loop(a: Tensor, b: Tensor) -> Tensor:
    """S[t] = a[t] S[t+1] + b[t] of one row."""
    solved, carry = [], 0.0
    for x, y in zip(reversed(a.tolist()), reversed(b.tolist()), strict=True):
        carry = x * carry + y
        solved.append(carry)
    return torch.tensor(solved[::-1], dtype=b.dtype)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def boundaries(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@cache
def of_any_length() -> Callable[[Tensor, Tensor], Tensor]:
    """The scan in a graph of dynamic length, which has other steps."""

    class Scan(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return reverse_scan(a, b)

    length = {1: Dim("length", min=2, max=2**24)}
    return export(Scan(), tuple(normal(2, 3, 10)), dynamic_shapes=(length, length)).module()


class TestReverseScan:
    @pytest.mark.parametrize("width", WIDTHS)
    def test_every_width_against_a_loop(self, width: int) -> None:
        a, b = normal(2, 3, width)
        want = torch.stack([loop(x, y) for x, y in zip(a, b, strict=True)])
        for scan in (reverse_scan, of_any_length()) if width > 1 else (reverse_scan,):
            got = scan(a, b)
            assert got.shape == b.shape
            torch.testing.assert_close(got, want, **CLOSE)

    def test_any_leading_dimensions(self) -> None:
        a, b = normal(2, 2, 3, 5)
        torch.testing.assert_close(reverse_scan(a, b)[1, 2], reverse_scan(a[1, 2], b[1, 2]), **CLOSE)
        assert reverse_scan(a[:0], b[:0]).shape == (0, 3, 5)

    @pytest.mark.parametrize("scan", [reverse_scan, lambda a, b: of_any_length()(a.expand(3, -1), b.expand(3, -1))[0]])
    @pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e300])
    @pytest.mark.parametrize("cut", range(9))
    def test_a_coefficient_of_zero_stops_what_is_not_finite(
        self, number: float, cut: int, scan: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        a, b = normal(2, 10)
        a[cut] = 0.0
        clean = scan(a, b)
        b[cut + 1] = number
        a[cut + 1 :: 2] = number
        got = scan(a, b)
        assert torch.equal(got[: cut + 1], clean[: cut + 1]), "to the bit"

    def test_what_is_not_finite_moves_to_the_left_only(self) -> None:
        a, b = normal(2, 21)
        b[12] = torch.nan
        got = reverse_scan(a, b)
        assert got.isnan().nonzero().flatten().tolist() == list(range(13))
        torch.testing.assert_close(got[13:], loop(a, torch.where(b.isnan(), 0.0, b))[13:], **CLOSE)

    @pytest.mark.parametrize("width", [1, 2, 5, 8])
    def test_first_and_second_derivatives(self, width: int) -> None:
        a, b = (x.requires_grad_() for x in normal(2, 2, width))
        assert torch.autograd.gradcheck(reverse_scan, (a, b))
        assert torch.autograd.gradgradcheck(reverse_scan, (a, b))

    def test_the_gradient_does_not_cross_a_cut(self) -> None:
        a, b = normal(2, 6)
        a[2] = 0.0
        b[4] = torch.nan
        a, b = a.requires_grad_(), b.requires_grad_()
        grad_a, grad_b = torch.autograd.grad(reverse_scan(a, b)[:3].sum(), (a, b))
        short_a, short_b = (x[:3].detach().requires_grad_() for x in (a, b))
        want_a, want_b = torch.autograd.grad(reverse_scan(short_a, short_b).sum(), (short_a, short_b))
        torch.testing.assert_close(grad_a[:3], want_a, **CLOSE)
        torch.testing.assert_close(grad_b[:3], want_b, **CLOSE)
        assert (grad_b[3:] == 0).all()

    @pytest.mark.parametrize("width", [1, 6, 9])
    def test_vmap_and_jvp(self, width: int) -> None:
        a, b, da, db = normal(4, 3, width)
        torch.testing.assert_close(torch.func.vmap(reverse_scan)(a, b), reverse_scan(a, b), **CLOSE)
        outer = torch.func.vmap(reverse_scan, in_dims=(None, 0))(a[0], b)
        torch.testing.assert_close(outer, reverse_scan(a[:1].expand_as(b), b), **CLOSE)
        _, tangent = torch.func.jvp(reverse_scan, (a, b), (da, db))
        step = 1e-6
        difference = (
            (reverse_scan(a + step * da, b + step * db) - reverse_scan(a - step * da, b - step * db)) / 2 / step
        )
        torch.testing.assert_close(tangent, difference, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_autocast_and_the_default_dtype_change_nothing(self, dtype: torch.dtype) -> None:
        a, b = normal(2, 3, 40).to(dtype)
        want = reverse_scan(a, b)
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.bfloat16)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.equal(reverse_scan(a, b), want)
        finally:
            torch.set_default_dtype(before)


LONG = 200_000


@pytest.mark.parametrize("discount", [0.9999, 0.999999, 1 - 1e-9, 1.0])
@pytest.mark.parametrize("packed", [False, True])
def test_the_discount_is_exact_over_200_000_tokens(discount: float, packed: bool) -> None:
    """Float32 data against Python's float64, token by token. A discount rounded to float32 is 3e-3 off."""
    x = torch.randn(LONG, generator=torch.Generator().manual_seed(0)) + 0.1
    mask = torch.rand(LONG, generator=torch.Generator().manual_seed(1)) < 0.99
    want, carry = [], 0.0
    for value, valid in zip(reversed(x.tolist()), reversed(mask.tolist()), strict=True):
        carry = value + discount * carry if valid else carry
        want.append(carry)
    wanted = torch.tensor(want[::-1], dtype=torch.float64)
    got = (
        discounted_sum(x, discount, mask, torch.tensor([0, LONG]))
        if packed
        else discounted_sum(x[None], discount, mask[None])
    )
    assert got.dtype is torch.float32
    assert (got.flatten() - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.mark.parametrize("turns", [False, True])
def test_estimators_of_200_000_tokens_have_the_discount_that_they_were_given(turns: bool) -> None:
    """γ = λ = 0.999999, against the same estimator of float64."""
    g = 0.999999
    x, v, p, q = torch.randn(4, 1, LONG, generator=torch.Generator().manual_seed(0))
    m = torch.ones(1, LONG, dtype=torch.bool)
    turn_ids = torch.arange(LONG)[None] // 2 if turns else None
    estimators: list[Callable[..., Tensor]] = [
        lambda x, v, p, q: gae(x, v, m, gamma=g, lam=g),
        lambda x, v, p, q: td_lambda(x, v, m, gamma=g, lam=g),
        lambda x, v, p, q: discounted_returns(x, m, turn_ids=turn_ids, gamma=g),
        lambda x, v, p, q: vtrace(x, v, p, p, m, gamma=g, lam=g),
    ]
    for estimator in estimators:
        want = estimator(*(y.double() for y in (x, v, p, q)))
        assert (estimator(x, v, p, q) - want).abs().max() <= 2e-6 * want.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "packed"),
    [
        *((gae, True), (discounted_returns, False)),
        *(pytest.param(*each, marks=pytest.mark.release) for each in ((gae, False), (discounted_returns, True))),
        *(pytest.param(reinforce_pp, packed, marks=pytest.mark.release) for packed in (False, True)),
    ],
)
def test_one_graph_for_all_lengths(fn: Callable[..., Tensor], packed: bool) -> None:
    """torch.compile gave up at the ninth length; the first length has a graph of its own, all others share one."""
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Tensor]:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(fn, backend=count, fullgraph=True)
    for width in (5, 7, 3, 17, 64, 100, 129, 1000, 1025, 4097, 6):
        tokens = [normal(2, width, seed=width + i) for i in range(1 + (fn is gae))]
        mask, cu = normal(2, width) > -1, None
        if packed:
            tokens, mask, cu = [x.flatten() for x in tokens], mask.flatten(), torch.tensor([0, width, 2 * width])
        torch.testing.assert_close(compiled(*tokens, mask, cu), fn(*tokens, mask, cu), **CLOSE)
    torch.compiler.reset()
    assert len(graphs) == 2


class TestDiscountedSum:
    @settings(max_examples=40)
    @given(LENGTHS, st.sampled_from([0.0, 1e-200, 0.5, 0.95, 1.0, 1.1]), st.booleans(), st.integers(0, 2**31))
    def test_packed_and_padded_against_a_loop(
        self, lengths: list[int], discount: float, one_each: bool, seed: int
    ) -> None:
        """Masked tokens are skipped, what stands there is not read, and no sequence reads another."""
        cu, tokens = boundaries(lengths), sum(lengths)
        mask = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) < 0.7
        x = torch.where(mask, normal(tokens, seed=seed), torch.nan)
        discounts = torch.full_like(x, discount).masked_fill(~mask, torch.nan) if one_each else discount
        got = discounted_sum(x, discounts, mask, cu)
        for i, (start, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
            valid = mask[start:end]
            want = loop(torch.full_like(x[start:end][valid], discount), x[start:end][valid])
            torch.testing.assert_close(got[start:end][valid], want, msg=f"sequence {i}", **CLOSE)
            each = discounts[None, start:end] if isinstance(discounts, Tensor) else discounts
            alone = discounted_sum(x[None, start:end], each, valid[None])
            torch.testing.assert_close(alone[0][valid], want, **CLOSE)

    def test_a_masked_token_hands_on_what_follows_it(self) -> None:
        mask = torch.tensor([[False, True, False, False, True, False]])
        got = discounted_sum(torch.tensor([[9.0, 1.0, 9.0, 9.0, 4.0, 9.0]]), 0.5, mask)
        assert got.tolist() == [[3, 3, 4, 4, 4, 0]]

    @pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 3e38])
    def test_a_sequence_keeps_what_is_not_finite(self, number: float) -> None:
        x, cu = normal(15).float(), torch.tensor([0, 4, 4, 11, 15])
        mask = torch.ones(15, dtype=torch.bool)
        clean = discounted_sum(x, 0.3, mask, cu)
        x[9] = number
        got = discounted_sum(x, 0.3, mask, cu)
        changed = (got != clean).nonzero().flatten().tolist()
        assert changed == list(range(4, 10))

    def test_the_gradient_is_zero_outside_the_mask_and_finite(self) -> None:
        mask = torch.tensor([[True, False, True]])
        x = torch.tensor([[1.0, torch.nan, 2.0]], requires_grad=True)
        discounted_sum(x, 0.5, mask)[mask].sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [[1, 0, 1.5]]

    @pytest.mark.parametrize("cu", [None, torch.tensor([0, 2, 2, 7])])
    def test_second_derivatives(self, cu: Tensor | None) -> None:
        shape = (1, 7) if cu is None else (7,)
        x, discounts = (y.reshape(shape).requires_grad_() for y in normal(2, 7))
        mask = torch.tensor([True, False, True, True, True, False, True]).reshape(shape)

        def function(x: Tensor, discounts: Tensor) -> Tensor:
            return discounted_sum(x, discounts, mask, cu)

        assert torch.autograd.gradcheck(function, (x, discounts))
        assert torch.autograd.gradgradcheck(function, (x, discounts))

    @pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95)])
    @pytest.mark.parametrize("share", [0.9, 1.0])
    def test_a_long_response_in_float32(self, gamma: float, lam: float, share: float) -> None:
        generator = torch.Generator().manual_seed(0)
        r, v = torch.randn(2, 2, 32768, generator=generator)
        mask = torch.rand(2, 4096, generator=generator).repeat_interleave(8, 1) < share
        want = gae(r.double(), v.double(), mask, gamma=gamma, lam=lam)
        assert (gae(r, v, mask, gamma=gamma, lam=lam) - want).abs().max() <= 1e-6 * want.abs().max()


@settings(max_examples=25)
@given(LENGTHS, st.integers(0, 2**31))
def test_the_sum_from_the_right_against_a_loop(lengths: list[int], seed: int) -> None:
    cu, tokens = boundaries(lengths), sum(lengths)
    mask = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) < 0.7
    x = torch.where(mask, normal(tokens, seed=seed), torch.nan)
    got = sum_from_right(x, mask, cu)
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        want = [float(x[t:end][mask[t:end]].sum()) for t in range(start, end)]
        assert got[start:end].tolist() == pytest.approx(want, abs=1e-12)
        assert sum_from_right(x[None, start:end], mask[None, start:end])[0].tolist() == pytest.approx(want, abs=1e-12)


@settings(max_examples=25)
@given(LENGTHS, st.booleans(), st.integers(0, 2**31))
def test_the_next_value_is_that_of_the_next_valid_token(lengths: list[int], goes_on: bool, seed: int) -> None:
    cu, tokens = boundaries(lengths), sum(lengths)
    mask = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) < 0.7
    x = torch.where(mask, normal(tokens, seed=seed), torch.nan)
    beyond = normal(len(lengths), seed=seed + 1) if goes_on else None
    got = next_values(x, mask, beyond, cu)
    for i, (start, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        after_last = 0.0 if beyond is None else float(beyond[i])
        valid = mask[start:end]
        want = [*x[start:end][valid].tolist()[1:], after_last][: int(valid.sum())]
        assert got[start:end][valid].tolist() == want
        row = next_values(x[None, start:end], valid[None], None if beyond is None else beyond[i : i + 1])
        assert row[0][valid].tolist() == want


def test_the_gradient_of_next_values() -> None:
    mask = torch.tensor([[True, False, True, False]])
    x = torch.tensor([[1.0, torch.nan, 2.0, torch.nan]], requires_grad=True)
    beyond = torch.tensor([5.0], requires_grad=True)
    next_values(x, mask, beyond)[mask].sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0, 0, 1, 0]]
    assert beyond.grad is not None
    assert beyond.grad.tolist() == [1]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, mask, cu: discounted_sum(x, 0.9, mask, cu),
        sum_from_right,
        lambda x, mask, cu: next_values(x, mask, None, cu),
    ],
    ids=["discounted_sum", "sum_from_right", "next_values"],
)
def test_no_rows_no_columns_and_no_tokens(function: Callable[..., Tensor]) -> None:
    for shape in [(0, 400), (3, 0)]:
        empty = torch.zeros(shape)
        assert function(empty, empty.bool(), None).shape == shape
    for cu in (torch.tensor([0]), torch.tensor([0, 0, 0])):
        assert function(torch.zeros(0), torch.zeros(0, dtype=torch.bool), cu).shape == (0,)


@pytest.mark.parametrize("cu", [None, torch.tensor([0, 3, 8])])
def test_the_sums_under_vmap_and_jvp(cu: Tensor | None) -> None:
    shape = (2, 4) if cu is None else (8,)
    x, dx = normal(2, 3, *shape)
    mask = torch.tensor([True, False, True, True, False, True, True, True]).reshape(shape)
    functions = (
        lambda x: discounted_sum(x, 0.9, mask, cu),
        lambda x: sum_from_right(x, mask, cu),
        lambda x: torch.where(mask, next_values(x, mask, None, cu), 0.0),
    )
    for function in functions:
        one_by_one = torch.stack([function(y) for y in x])
        torch.testing.assert_close(torch.func.vmap(function)(x), one_by_one, **CLOSE)
        _, tangent = torch.func.jvp(function, (x[0],), (dx[0],))
        torch.testing.assert_close(tangent, function(dx[0]), msg="they are linear", **CLOSE)
