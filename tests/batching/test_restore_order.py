"""Back to the order of the rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlprims.batching import balance, micro_batches, pack, restore_order


@given(st.lists(st.integers(0, 50), min_size=3, max_size=40))
def test_restore_order_of_divided_rows_is_the_old_order(lengths: list[int]) -> None:
    for parts in (balance(lengths, 3), pack(lengths, max_tokens=60), micro_batches(lengths, max_tokens=60)):
        end_to_end = [f"row {row}" for part in parts for row in part]
        assert [end_to_end[place] for place in restore_order(parts)] == [f"row {row}" for row in range(len(lengths))]


def test_restore_order_of_no_rows() -> None:
    assert restore_order([]) == restore_order([[], []]) == []


@pytest.mark.parametrize("parts", [[[0, 2]], [[0], [0]], [[1], [2]]])
def test_parts_with_a_gap_or_a_row_twice_are_refused(parts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="exactly once"):
        restore_order(parts)
