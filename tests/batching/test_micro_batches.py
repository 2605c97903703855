"""Rows into micro-batches: each once, none too large, like with like, and no more than needed."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlprims.batching import micro_batches

LENGTHS = st.lists(st.integers(0, 50), max_size=40)


@given(LENGTHS, st.integers(50, 300))
def test_micro_batches_have_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = micro_batches(lengths, max_tokens=budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert batch == sorted(batch) != []
        assert len(batch) * max(lengths[row] for row in batch) <= budget


@given(LENGTHS, st.integers(50, 300))
def test_rows_of_a_micro_batch_are_neighbours_in_length(lengths: list[int], budget: int) -> None:
    batches = micro_batches(lengths, max_tokens=budget)
    for longer, shorter in pairwise(batches):
        assert min(lengths[row] for row in longer) >= max(lengths[row] for row in shorter)


@given(LENGTHS, st.integers(50, 300))
def test_only_the_last_could_take_another_row(lengths: list[int], budget: int) -> None:
    for batch in micro_batches(lengths, max_tokens=budget)[:-1]:
        assert (len(batch) + 1) * max(*(lengths[row] for row in batch), 1) > budget


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(12, 40))
def test_micro_batches_are_the_fewest(lengths: list[int], budget: int) -> None:
    def fits(owners: tuple[int, ...]) -> bool:
        parts = [[x for x, o in zip(lengths, owners, strict=True) if o == part] for part in set(owners)]
        return all(len(part) * max(part) <= budget for part in parts)

    sizes = (len(set(owners)) for owners in product(range(len(lengths)), repeat=len(lengths)) if fits(owners))
    assert len(micro_batches(lengths, max_tokens=budget)) == min(sizes)


def test_micro_batches_do_not_depend_on_the_order_of_equal_rows() -> None:
    assert micro_batches([4, 4, 4, 4], max_tokens=8) == [[0, 1], [2, 3]]


def test_micro_batches_of_no_rows() -> None:
    assert micro_batches([], max_tokens=8) == []


def test_a_row_beyond_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match="row 1 has 9 tokens, more than max_tokens=8"):
        micro_batches([3, 9, 2], max_tokens=8)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=30), st.integers(24, 80))
def test_left_and_right_padding_are_both_in_the_budget(rows: list[tuple[int, int]], budget: int) -> None:
    prompts, responses = [p for p, _ in rows], [r for _, r in rows]
    parts = micro_batches(prompts, responses, max_tokens=budget)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    for part in parts:
        width = max(prompts[row] for row in part) + max(responses[row] for row in part)
        assert len(part) * width <= budget
