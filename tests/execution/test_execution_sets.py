"""Kept sets are read from what vLLM returns, in its own classes: by hand, and for any sets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlprims.types import SamplingSupport

pytest.importorskip("vllm")

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.v1.outputs import SamplingMaskLists

from rlprims.execution.ray._kept import rows_of_log_probs, rows_of_masks, sets_of

pytestmark = pytest.mark.ray
SIZE = 5
WHOLE = frozenset(range(SIZE))
A_SET = st.frozensets(st.integers(0, SIZE - 1), min_size=1)


def in_steps(sets, lengths):
    """The sets of one response as the CSR arrays of a step, which has other requests too, and returns some tokens."""
    parts, start = [], 0
    for length in lengths:
        step = [[3], *map(sorted, sets[start : start + length]), [0, 4]]
        offsets = np.cumsum([0, *map(len, step)])
        csr = SamplingMaskLists(np.array(sum(step, []), np.int32), offsets, [0, 1, 1 + length, 2 + length])  # noqa: RUF017
        parts.append(csr.slice_request(1, length))
        start += length
    return parts


def flat(sets, drawn):
    found = FlatLogprobs()
    for one, token in zip(sets, drawn, strict=True):
        likeliest = sorted(range(SIZE), key=lambda v, one=one: (v not in one, -v))
        scores = [-1.0 if v in one else -np.inf for v in likeliest]
        found.append_fast([token, *likeliest], [-1.0, *scores], range(SIZE + 1), [None] * (SIZE + 1))
    return found


def test_masks_by_hand():
    """Three tokens in two steps: {1, 4}, then {2} and the whole vocabulary, of which a batch has no ids."""
    first = SamplingMaskLists(np.array([1, 4], np.int32))
    second = SamplingMaskLists(np.array([2, 0, 1, 2, 3, 4], np.int32), np.array([0, 1, 6]))
    ids, counts = sets_of([*rows_of_masks(first), *rows_of_masks(second)], SIZE)
    assert (ids.tolist(), counts.tolist()) == ([1, 4, 2], [2, 1, 0])
    assert ids.dtype == counts.dtype == torch.int32
    assert [x.tolist() for x in sets_of([], SIZE)] == [[], []]


def test_log_probs_by_hand():
    """The drawn token 4 is there twice, or alone if more tokens are as likely as the last that vLLM returns."""
    found = FlatLogprobs()
    found.append_fast([4, 1, 4, 0], [-0.5, -0.1, -0.5, -np.inf], [2, 1, 2, 3], [None] * 4)
    found.append_fast([4, 2], [-0.7, -0.7], [2, 1], [None] * 2)
    found.append_fast([3, 4, 3, 2, 1, 0], [-1.6] * 6, range(6), [None] * 6)
    ids, counts = sets_of(rows_of_log_probs(found), SIZE)
    assert (ids.tolist(), counts.tolist()) == ([1, 4, 2, 4], [2, 2, 0])
    assert rows_of_log_probs(FlatLogprobs()) == []


@settings(deadline=None)
@given(st.data())
def test_any_sets_come_back_from_both(data):
    lengths = data.draw(st.lists(st.integers(1, 3), max_size=4))
    sets = data.draw(st.lists(A_SET, min_size=sum(lengths), max_size=sum(lengths)))
    drawn = [data.draw(st.sampled_from(sorted(one))) for one in sets]
    by_masks = [row for csr in in_steps(sets, lengths) for row in rows_of_masks(csr)]
    for rows in (by_masks, rows_of_log_probs(flat(sets, drawn))):
        ids, counts = sets_of(rows, SIZE)
        allowed = SamplingSupport.from_counts(ids, counts).allowed(SIZE)
        assert [set(row.nonzero()[:, 0].tolist()) for row in allowed] == sets
        assert [not count for count in counts.tolist()] == [one == WHOLE for one in sets]
        assert ids.tolist() == [v for one in sets if one != WHOLE for v in sorted(one)]
