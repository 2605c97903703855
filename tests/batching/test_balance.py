"""Parts that take equally long: each row once, equal sizes if asked, and a maximum near the best there is."""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlprims.batching import attention_workload, balance, micro_batches, pack
from rlprims.batching._partition import exchange, longest_first_in_rounds

METHODS = (None, "longest_first", "karmarkar_karp")
ROWS = st.lists(st.integers(0, 60), min_size=1, max_size=30)


def heaviest(lengths: Sequence[int], parts: list[list[int]]) -> int:
    return max(sum(lengths[row] for row in part) for part in parts)


def best(lengths: Sequence[int], parts: int, *, equal_size: bool = False) -> int:
    """The smallest maximum of all assignments."""
    found = []
    for owners in product(range(parts), repeat=len(lengths)):
        sizes = [owners.count(part) for part in range(parts)]
        if not equal_size or len(set(sizes)) == 1:
            found.append(max(sum(x for x, o in zip(lengths, owners, strict=True) if o == p) for p in range(parts)))
    return min(found)


def lognormal(rows: int, seed: int = 0, mean: float = 6.5) -> np.ndarray:
    """Lengths of responses: many short, a few at the limit; with a mean of 8, a fifth."""
    return np.clip(np.random.default_rng(seed).lognormal(mean, 1.0, rows), 16, 8192).astype(np.int64)


@pytest.mark.parametrize("method", METHODS)
@given(ROWS, st.integers(1, 8))
def test_balance_has_every_row_once_and_no_part_empty(method: str | None, lengths: list[int], parts: int) -> None:
    parts = min(parts, len(lengths))
    got = balance(lengths, parts, method=method)
    assert len(got) == parts
    assert sorted(row for part in got for row in part) == list(range(len(lengths)))
    for part in got:
        assert part == sorted(part) != []


@pytest.mark.parametrize("method", METHODS)
@given(ROWS, st.integers(1, 8))
def test_equal_sizes(method: str | None, lengths: list[int], parts: int) -> None:
    lengths = lengths * parts
    got = balance(lengths, parts, equal_size=True, method=method)
    assert sorted(row for part in got for row in part) == list(range(len(lengths)))
    assert {len(part) for part in got} == {len(lengths) // parts}


@given(ROWS, st.integers(1, 8))
def test_longest_first_keeps_the_bound_of_graham(lengths: list[int], parts: int) -> None:
    """List scheduling: the last row of the heaviest part went to the lightest, which was not above the mean."""
    parts = min(parts, len(lengths))
    total, longest = sum(lengths), max(lengths)
    got = heaviest(lengths, balance(lengths, parts, method="longest_first"))
    assert got <= total / parts + longest * (1 - 1 / parts) + 1e-9


@given(ROWS, st.integers(1, 6))
def test_rounds_leave_a_small_gap(lengths: list[int], parts: int) -> None:
    """Rounds, the longest of a round to the lightest, leave a gap of at most longest − shortest."""
    work = np.array(lengths * parts)
    loads = np.bincount(longest_first_in_rounds(work, parts), work)
    assert loads.max() - loads.min() <= work.max() - work.min()
    assert longest_first_in_rounds(np.array([9, 8, 2, 1]), 2).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("equal_size", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_beside_all_assignments_of_a_few_rows(method: str | None, equal_size: bool) -> None:
    """Never beyond Graham's 4/3 − 1/(3k), and nearly always the optimum."""
    random = np.random.default_rng(0)
    reached, cases = 0, 60
    for _ in range(cases):
        parts = int(random.integers(2, 4))
        rows = parts * int(random.integers(1, 3)) if equal_size else int(random.integers(parts, 8))
        lengths = random.integers(0, 30, rows).tolist()
        got = heaviest(lengths, balance(lengths, parts, equal_size=equal_size, method=method))
        least = best(lengths, parts, equal_size=equal_size)
        assert least <= got <= least * (4 / 3 - 1 / (3 * parts)) + 1e-9
        reached += got == least
    assert reached >= 0.95 * cases


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("rows", "parts"), [(1024, 8), (4096, 64), (32768, 512)])
def test_loads_are_nearly_equal_with_equal_sizes(rows: int, parts: int, method: str | None) -> None:
    for seed in range(3):
        lengths = lognormal(rows, seed)
        bound = max(lengths.sum() / parts, lengths.max())
        assert heaviest(lengths, balance(lengths, parts, equal_size=True, method=method)) <= bound * (1 + 2e-4)


@pytest.mark.parametrize(("rows", "parts"), [(1024, 32), (4096, 64), (8192, 128)])
def test_loads_are_nearly_equal(rows: int, parts: int) -> None:
    for seed, mean in product(range(3), (6.5, 8.0)):
        lengths = lognormal(rows, seed, mean)
        bound = max(lengths.sum() / parts, lengths.max())
        assert heaviest(lengths, balance(lengths, parts)) <= bound * (1 + 1e-4)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_one_exchange_is_the_best_of_all(first: list[int], second: list[int]) -> None:
    """Two parts: no other exchange, and no other row that goes over alone, leaves a smaller gap."""
    work = np.array(first + second)
    owners = np.array([0] * len(first) + [1] * len(second))
    loads = np.bincount(owners, work).astype(np.int64)
    gap = int(loads[0] - loads[1])
    heavy, light = (first, second) if gap > 0 else (second, first)
    swaps = [abs(abs(gap) - 2 * (a - b)) for a in heavy for b in light]
    moves = [abs(abs(gap) - 2 * a) for a in heavy]
    for equal_size, others in ((True, swaps), (False, swaps + moves)):
        after, sums = owners.copy(), loads.copy()
        exchange(work, after, sums, equal_size, shift=0)
        assert (np.bincount(after, work, 2) == sums).all()
        assert abs(sums[0] - sums[1]) == min([abs(gap), *others])
        assert not equal_size or (np.bincount(after, minlength=2) == np.bincount(owners, minlength=2)).all()


def test_differencing_by_hand() -> None:
    """Karmarkar and Karp on 8 7 6 5 4: 8−7, 6−5, 4−1, 3−1, a difference of 2; one exchange makes it 0."""
    lengths = [8, 7, 6, 5, 4]
    assert heaviest(lengths, balance(lengths, 2, method="karmarkar_karp")) == 15


def test_one_giant_stays_alone() -> None:
    assert sorted(balance([100, 1, 1, 1, 1], 2)) == [[0], [1, 2, 3, 4]]


def test_rows_without_work_fill_parts() -> None:
    for method in METHODS:
        assert sorted(map(len, balance([0, 0, 7], 3, method=method))) == [1, 1, 1]


@pytest.mark.parametrize("method", METHODS)
@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from("abcdef")), min_size=1, max_size=25), st.integers(1, 4))
def test_groups_stay_together(method: str | None, rows: list[tuple[int, str]], parts: int) -> None:
    lengths, labels = [length for length, _ in rows], [label for _, label in rows]
    parts = min(parts, len(set(labels)))
    got = balance(lengths, parts, labels, method=method)
    assert sorted(row for part in got for row in part) == list(range(len(rows)))
    homes = [{labels[row] for row in part} for part in got]
    assert sum(map(len, homes)) == len(set(labels))
    assert all(homes)


def test_groups_of_equal_size_give_equal_sizes() -> None:
    got = balance([5, 5, 1, 1, 2, 2, 4, 4], 2, list("aabbccdd"), equal_size=True)
    assert sorted(got) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_answer_does_not_depend_on_the_kind_of_list() -> None:
    lengths = lognormal(64)
    assert balance(lengths, 4) == balance(lengths.tolist(), 4) == balance(lengths.astype(np.int32), 4)


def test_workload_counts_long_rows_more() -> None:
    """One row of 49152 tokens costs three of 24576: 6 h l + l² with 6 h = 24576."""
    assert attention_workload([24576, 49152]).tolist() == [2 * 24576**2, 6 * 24576**2]
    assert attention_workload([10], hidden_size=100).tolist() == [6100]
    lengths = [49152, 24576, 24576, 24576]
    assert sorted(balance(attention_workload(lengths), 2)) == [[0], [1, 2, 3]]


@pytest.mark.parametrize(
    ("call", "blamed"),
    [
        (lambda: balance([1, 2], 3), "parts=3, .* at most 2"),
        (lambda: balance([1, 2], 0), "parts=0"),
        (lambda: balance([], 1), "at most 0"),
        (lambda: balance([1, 2, 3], 2, equal_size=True), "equal_size=True with 3 rows"),
        (lambda: balance([1, 2, 3], 2, ["a", "a", "b"], equal_size=True), "3 rows in 2 units of 1 to 2"),
        (lambda: balance([1, 2], 2, ["a"]), "2 lengths but 1 group_ids"),
        (lambda: balance([1, 2], 2, ["a", "a"]), "parts=2, .* at most 1"),
        (lambda: balance([1, -2], 2), "of at least 0"),
        (lambda: balance([1.5, 2.0], 2), "expected integers"),
        (lambda: balance([1, 2], 2, method="greedy"), "method='greedy', expected 'longest_first' or 'karmarkar_karp'"),
    ],
)
def test_balance_refuses_impossible_sizes(call: object, blamed: str) -> None:
    with pytest.raises(ValueError, match=blamed):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda lengths: balance(lengths, 1),
        lambda lengths: attention_workload(lengths),
        lambda lengths: micro_batches(lengths, max_tokens=10),
        lambda lengths: micro_batches([1, 1], lengths, max_tokens=10),
        lambda lengths: pack(lengths, max_tokens=10),
        lambda lengths: pack(lengths, ["a", "a"], max_tokens=10),
    ],
)
def test_negative_lengths_are_refused_everywhere(call: Callable[[list[int]], object]) -> None:
    """micro_batches took them, and a group of -5 and 3 counted as a part of -2."""
    with pytest.raises(ValueError, match=r"lengths is -5 in row 0, expected integers \(B,\) of at least 0"):
        call([-5, 3])
