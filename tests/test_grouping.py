"""Groups: labels are names, and statistics keep their digits."""

import math
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.grouping import (
    dense_ids,
    group_bounds,
    group_centred,
    group_count,
    group_mean,
    group_mean_of_others,
    group_ranks,
    group_std,
    group_sum,
    is_constant,
    is_varied,
    safe_sqrt,
    variance_of_centred,
)

IDS = torch.tensor([0, 1, 0, 1, 0, 2])
X = torch.tensor([1.0, 10.0, 2.0, 30.0, 6.0, 5.0], dtype=torch.float64)


def group_variance(x: torch.Tensor, *ids: Any, ddof: int = 1) -> torch.Tensor:
    return variance_of_centred(group_centred(x, *ids), *ids, ddof=ddof)


class TestLabels:
    def test_labels_that_look_alike_are_different_names(self) -> None:
        assert dense_ids(["1", "001", 1.25, 1.75, -1, "1"]).tolist() == [0, 1, 2, 3, 4, 0]

    def test_arrays_tensors_tuples_and_uuids(self) -> None:
        same = uuid.uuid4()
        assert dense_ids(np.array(["a", "b", "a"], dtype=object)).tolist() == [0, 1, 0]
        assert dense_ids(torch.tensor([7, -7, 7])).tolist() == [0, 1, 0]
        assert dense_ids([("p", 1), ("p", 2), ("p", 1)]).tolist() == [0, 1, 0]
        assert dense_ids([same, uuid.uuid4(), same]).tolist() == [0, 1, 0]
        assert dense_ids([]).dtype is torch.int64

    @pytest.mark.parametrize("labels", [[1.0, math.nan], np.array([math.nan]), torch.tensor([math.nan])])
    def test_nan_belongs_to_no_group(self, labels: list[float]) -> None:
        with pytest.raises(ValueError, match="NaN"):
            dense_ids(labels)

    def test_what_cannot_be_hashed_is_refused(self) -> None:
        with pytest.raises(ValueError, match="hashable"):
            dense_ids([["a"], ["b"]])

    def test_labels_in_runs_are_named_as_others_are(self) -> None:
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

    @pytest.mark.parametrize(
        "labels", [[3, 3, 7, 7, 7, 9], [7, 3, 7, 9, 3, 7], [2**62, 0, 2**62, -1], [-5, 4, -5, 4], [9, 8, 8]]
    )
    @pytest.mark.parametrize("dtype", [np.int64, np.float64, object])
    def test_integers_are_names_too(self, labels: list[int], dtype: type) -> None:
        want: dict[int, int] = {}
        assert dense_ids(np.array(labels, dtype)).tolist() == [want.setdefault(name, len(want)) for name in labels]

    @given(st.lists(st.one_of(st.text(max_size=3), st.integers(-3, 3), st.none(), st.booleans())))
    def test_ids_are_dense_and_as_different_as_the_labels(self, labels: list[object]) -> None:
        ids = dense_ids(labels).tolist()
        assert sorted(set(ids)) == list(range(len(set(ids))))
        for i, a in zip(ids, labels, strict=True):
            for j, b in zip(ids, labels, strict=True):
                assert (i == j) == (a == b)


class TestStatistics:
    @given(
        st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9), st.booleans()), max_size=20),
        st.integers(0, 2),
        st.booleans(),
    )
    def test_moments_are_those_of_each_group_alone(
        self, rows: list[tuple[int, int, bool]], ddof: int, all_valid: bool
    ) -> None:
        ids = dense_ids([label for label, _, _ in rows])
        x = torch.tensor([value / 4 for _, value, _ in rows], dtype=torch.float64)
        valid = torch.tensor([all_valid or keep for _, _, keep in rows], dtype=torch.bool)
        of = (x, ids, None if all_valid else valid)
        got = [group_count(*of[1:]), *group_bounds(*of), group_mean(*of), group_centred(*of), group_sum(*of)]
        got += [group_variance(*of, ddof=ddof), group_std(*of, ddof=ddof)]
        for i in range(len(rows)):
            mine = x[(ids == ids[i]) & valid]
            n = len(mine)
            mean = mine.mean() if n else torch.tensor(0.0)
            scatter = (mine - mean).square().sum()
            variance = scatter / (n - ddof) if n > ddof else torch.tensor(0.0)
            want = [n, mine.min() if n else 0, mine.max() if n else 0, mean, x[i] - mean, mine.sum()]
            want += [variance, variance.sqrt()]
            assert [y[i].item() for y in got] == pytest.approx([float(y) for y in want], abs=1e-12)

    def test_by_hand(self) -> None:
        assert group_count(IDS).tolist() == [3, 2, 3, 2, 3, 1]
        assert group_mean(X, IDS).tolist() == [3, 20, 3, 20, 3, 5]
        assert group_centred(X, IDS).tolist() == [-2, -10, -1, 10, 3, 0]
        assert group_std(X, IDS).tolist() == pytest.approx([7**0.5, 200**0.5, 7**0.5, 200**0.5, 7**0.5, 0])
        assert group_std(X, IDS, ddof=0)[:2].tolist() == pytest.approx([(14 / 3) ** 0.5, 10])

    def test_rows_that_do_not_count_get_the_number_of_their_group(self) -> None:
        valid = torch.tensor([True, True, False, True, True, False])
        x = X.clone()
        x[2] = torch.nan
        assert group_mean(x, IDS, valid).tolist() == [3.5, 20, 3.5, 20, 3.5, 0]
        low, high = group_bounds(x, IDS, valid)
        assert low.tolist() == [1, 10, 1, 10, 1, 0]
        assert high.tolist() == [6, 30, 6, 30, 6, 0]

    @pytest.mark.parametrize("offset", [1e3, 1e5, -1e6])
    def test_a_common_offset_takes_no_digits_in_float32(self, offset: float) -> None:
        x = torch.tensor([1.0, 2.0, 4.0, 4.0])
        ids = torch.zeros(4, dtype=torch.int64)
        assert torch.equal(x + offset - offset, x)
        assert torch.equal(group_centred(x + offset, ids), group_centred(x, ids))
        assert torch.equal(group_std(x + offset, ids), group_std(x, ids))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("number", [0.1, 1000.1, -1e6 / 3])
    def test_equal_numbers_have_that_mean_and_no_deviation(self, number: float, dtype: torch.dtype) -> None:
        x = torch.full((7,), number, dtype=dtype)
        ids = torch.zeros(7, dtype=torch.int64)
        assert (group_mean(x, ids) == x).all()
        assert (group_std(x, ids) == 0).all()
        assert is_constant(x, ids).all()

    def test_constant_is_relative_above_one_and_absolute_below(self) -> None:
        x = torch.tensor([1000.0, 1000.5, -1000.0, -1000.5, 0.0, 0.0005, 0.0, 0.002], dtype=torch.float64)
        ids = torch.arange(8) // 2
        assert is_constant(x, ids, tolerance=1e-3)[::2].tolist() == [True, True, True, False]

    def test_a_group_with_nan_is_neither_constant_nor_varied(self) -> None:
        x, ids = torch.tensor([1.0, torch.nan, 3.0, 4.0, 5.0, 5.0]), torch.arange(6) // 2
        assert is_constant(x, ids)[::2].tolist() == [False, False, True]
        assert is_varied(x, ids)[::2].tolist() == [False, True, False]

    def test_a_number_that_is_not_finite_stays_in_its_group(self) -> None:
        x = torch.tensor([1.0, torch.nan, 3.0, torch.inf, 5.0, 7.0])
        ids = torch.tensor([0, 1, 0, 2, 0, 1])
        clean = [f(x[ids == 0], torch.zeros(3, dtype=torch.int64)) for f in (group_mean, group_centred, group_std)]
        got = [f(x, ids)[ids == 0] for f in (group_mean, group_centred, group_std)]
        torch.testing.assert_close(got, clean, rtol=0, atol=0)

    @pytest.mark.parametrize("some_valid", [False, True])
    def test_first_and_second_derivatives(self, some_valid: bool) -> None:
        x = X.clone().requires_grad_()
        valid = torch.tensor([True, True, True, True, False, True]) if some_valid else None
        for f in (group_sum, group_mean, group_centred, group_variance):
            assert torch.autograd.gradcheck(lambda x, f=f: f(x, IDS, valid), x)
            assert torch.autograd.gradgradcheck(lambda x, f=f: f(x, IDS, valid), x)

    def test_the_root_of_zero_has_no_gradient(self) -> None:
        x = torch.tensor([0.0, 4.0], dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(safe_sqrt(x).sum(), x, create_graph=True)
        assert grad.tolist() == [0, 0.25]
        (second,) = torch.autograd.grad(grad.sum(), x)
        assert second.tolist() == [0, -1 / 32]

    def test_autocast_and_the_default_dtype_change_nothing(self) -> None:
        x = X.float()
        statistics = (group_mean, group_centred, group_std)
        want = [f(x, IDS) for f in statistics]
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.bfloat16)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got = [f(x, IDS) for f in statistics]
        finally:
            torch.set_default_dtype(before)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class TestRanks:
    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2), st.booleans()), max_size=15))
    def test_each_group_ascends_and_equal_numbers_keep_their_order(self, rows: list[tuple[int, int, bool]]) -> None:
        ids = dense_ids([label for label, _, _ in rows])
        x = torch.tensor([float(value) for _, value, _ in rows])
        valid = torch.tensor([keep for _, _, keep in rows], dtype=torch.bool)
        ranks = group_ranks(x, ids, valid)
        want = sorted(range(len(rows)), key=lambda i: (int(ids[i]), not rows[i][2], rows[i][1], i))
        assert ranks.order.tolist() == want
        in_order = [int(ids[i]) for i in want]
        assert ranks.ranks.tolist() == [k - in_order.index(group) for k, group in enumerate(in_order)]
        assert ranks.sizes.tolist() == [sum(rows[j][2] for j in range(len(rows)) if ids[j] == ids[i]) for i in want]
        assert ranks.cu.tolist() == [sum(group < g for group in in_order) for g in range(len(rows) + 1)]
        assert torch.equal(ranks.unsort(ranks.sort(x)), x)


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([0.0, 1.0]),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([0, 5]),
        torch.tensor([-1, 0]),
        torch.zeros(2, 1).long(),
    ],
    ids=["float", "int32", "not dense", "negative", "two axes"],
)
def test_ids_that_do_not_fit_are_refused(ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"group_ids.*dense_ids"):
        group_mean(torch.zeros(2), ids)


@pytest.mark.parametrize("valid", [torch.ones(2), torch.ones(3, dtype=torch.bool)])
def test_valid_rows_that_do_not_fit_are_refused(valid: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="valid_rows"):
        group_mean(torch.zeros(2), torch.tensor([0, 0]), valid)


def test_a_row_that_does_not_count_is_beside_the_others_that_do() -> None:
    """Its own value is not taken out of their mean, because it is not in it."""
    scores, valid = torch.tensor([3.0, 1.0, 8.0]), torch.tensor([True, True, False])
    assert group_mean_of_others(scores, torch.zeros(3, dtype=torch.int64), valid).tolist() == [1, 3, 2]


def test_bounds_of_half_precision_are_single() -> None:
    low, high = group_bounds(torch.tensor([3.0, 1.0], dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64))
    assert low.dtype is high.dtype is torch.float32
