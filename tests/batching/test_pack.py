"""Packed micro-batches: within the budget, and as few as possible."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlprims.batching import pack

LENGTHS = st.lists(st.integers(0, 50), max_size=40)


def fewest(lengths: list[int], budget: int) -> int:
    """By trying all assignments."""
    for parts in range(1, len(lengths) + 1):
        for owners in product(range(parts), repeat=len(lengths)):
            if all(sum(x for x, o in zip(lengths, owners, strict=True) if o == p) <= budget for p in range(parts)):
                return parts
    return 0


@given(LENGTHS, st.integers(50, 200))
def test_pack_has_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    parts = pack(lengths, max_tokens=budget)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        assert part == sorted(part) != []
        assert sum(lengths[row] for row in part) <= budget


@given(LENGTHS, st.integers(50, 200))
def test_no_two_parts_could_be_one(lengths: list[int], budget: int) -> None:
    loads = sorted(sum(lengths[row] for row in part) for part in pack(lengths, max_tokens=budget))
    assert len(loads) < 2 or loads[0] + loads[1] > budget


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(20, 30))
def test_as_few_as_possible_for_a_few_rows(lengths: list[int], budget: int) -> None:
    """Best fit decreasing needs at least seven rows to be one part too many."""
    assert len(pack(lengths, max_tokens=budget)) == fewest(lengths, budget)


@pytest.mark.parametrize("rows", [1024, 8192])
def test_the_lower_bound_is_reached_for_lengths_of_the_usual_spread(rows: int) -> None:
    for seed in range(3):
        lengths = np.clip(np.random.default_rng(seed).lognormal(6.5, 1.0, rows), 16, 8192).astype(np.int64)
        assert len(pack(lengths, max_tokens=8192)) == -(-int(lengths.sum()) // 8192)


@given(LENGTHS, st.integers(1, 12))
def test_at_least_so_many_parts(lengths: list[int], at_least: int) -> None:
    at_least = max(min(at_least, len(lengths)), 1)
    fewer = pack(lengths, max_tokens=100)
    parts = pack(lengths, max_tokens=100, min_parts=at_least)
    assert len(parts) == max(len(fewer), at_least if lengths else 0)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(part and sum(lengths[row] for row in part) <= 100 for part in parts)


def test_a_part_is_split_into_halves_of_like_length() -> None:
    parts = pack([4, 4, 4, 4], max_tokens=100, min_parts=2)
    assert sorted(map(len, parts)) == [2, 2]


def test_the_fullest_part_is_split_first() -> None:
    assert sorted(pack([6, 4, 1, 1], max_tokens=10, min_parts=3)) == [[0], [1], [2, 3]]


def test_groups_stay_together() -> None:
    assert pack([6, 5, 4, 5], ["a", "b", "a", "b"], max_tokens=10) == [[0, 2], [1, 3]]
    assert pack([6, 5, 4, 5], max_tokens=10) == [[0, 2], [1, 3]]
    assert pack([6, 4, 4, 5], ["a", "a", "b", "b"], max_tokens=10) == [[0, 1], [2, 3]]


def test_pack_of_no_rows() -> None:
    assert pack([], max_tokens=8) == []


@pytest.mark.parametrize(
    ("call", "blamed"),
    [
        (lambda: pack([3, 9, 2], max_tokens=8), "row 1 has 9 tokens, more than max_tokens=8"),
        (lambda: pack([1, 5, 2, 5], ["b", "a", "b", "a"], max_tokens=8), "the group of row 1 has 10 tokens"),
        (lambda: pack([3, 3], max_tokens=8, min_parts=3), "min_parts=3, expected at most 2"),
    ],
)
def test_pack_refuses_impossible_sizes(call: object, blamed: str) -> None:
    with pytest.raises(ValueError, match=blamed):
        call()


@pytest.mark.parametrize("budget", [np.int64(2**63 - 1), 2**80], ids=repr)
def test_a_budget_without_end_is_one_part(budget: int) -> None:
    assert pack([5, 9, 2], max_tokens=budget) == [[0, 1, 2]]
