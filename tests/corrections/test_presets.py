"""The names under which people know them, by hand."""

import math

import pytest
import torch

from rlprims.corrections import Weights, geometric_gate, icepop, mis, seq_mask_tis, tis, token_veto
from rlprims.testing import check_weights
from tests.records import Record, one_more

RECORDS = [
    Record("corrections.tis", check_weights, matters={"high": 1.01}),
    Record("corrections.icepop", check_weights, matters={"low": 0.95, "high": 1.01}),
    Record("corrections.mis", check_weights, matters={"high": 1.01, "all_reduce_rows": one_more}),
    Record("corrections.geometric_gate", check_weights, matters={"low": 0.9, "high": 1.1}),
    Record(
        "corrections.geometric_gate",
        check_weights,
        call={"low": 0.9, "high": 1.1},
        matters={"all_reduce_rows": one_more},
    ),
    Record(
        "corrections.seq_mask_tis",
        check_weights,
        call={"low": 0.98, "high": 1.05},
        matters={"low": 0.9, "high": 1.1, "all_reduce_rows": one_more},
    ),
    Record("corrections.token_veto", check_weights, matters={"low": 0.9, "high": 1.1, "all_reduce_rows": one_more}),
]


def values(fn, *responses: list[float], **options) -> list[list[float]]:
    """Of responses of one length, with these ratios of trainer to sampler."""
    x = torch.tensor(responses, dtype=torch.float64).log()
    got: Weights = fn(x, torch.zeros_like(x), torch.ones_like(x, dtype=torch.bool), **options)
    return [pytest.approx(row) for row in got.values.tolist()]


@pytest.mark.parametrize(
    ("fn", "want"),
    [
        (tis, [[0.1, 1.0, 2.0], [1.002, 0.999, 1.0]]),
        (icepop, [[0.0, 1.0, 4.0], [1.002, 0.999, 1.0]]),
        (mis, [[0.4] * 3, [1.000998] * 3]),
        (geometric_gate, [[0.0] * 3, [1.0] * 3]),
        (seq_mask_tis, [[0.0] * 3, [1.002, 0.999, 1.0]]),
        (token_veto, [[1.0] * 3, [1.0] * 3]),
    ],
)
def test_by_hand(fn, want: list[list[float]]) -> None:
    assert values(fn, [0.1, 1.0, 4.0], [1.002, 0.999, 1.0]) == want


def test_mis_masks_the_product_above() -> None:
    assert values(mis, [2.0, 1.4], [2.0, 1.6]) == [[2.8, 2.8], [0.0, 0.0]]


def test_geometric_does_not_see_the_length_and_mis_does() -> None:
    long = [math.exp(0.0009)] * 2000
    assert values(geometric_gate, long)[0] == [1.0] * 2000
    assert values(mis, long)[0] == [0.0] * 2000


@pytest.mark.parametrize(("ratio", "kept"), [(0.9e-4, 0.0), (1.1e-4, 1.0), (99.9, 1.0), (100.1, 0.0)])
def test_token_veto_of_one_token(ratio: float, kept: float) -> None:
    assert values(token_veto, [1.0, ratio, 1.0]) == [[kept] * 3]
    assert values(token_veto, [1.0, ratio, 1.0], low=0.0, high=math.inf) == [[1.0] * 3]


def test_seq_mask_tis_does_not_cap_the_ratio_of_a_token() -> None:
    assert values(seq_mask_tis, [50.0, 0.02]) == [[50.0, 0.02]]


@pytest.mark.parametrize(
    ("fn", "inside", "outside"),
    [
        (icepop, [0.51, 4.9], [0.49, 5.1]),
        (mis, [2.9], [3.1]),
        (geometric_gate, [0.9991, 1.0009], [0.9989, 1.0011]),
        (seq_mask_tis, [0.9991, 1.0019], [0.9989, 1.0021]),
    ],
)
def test_the_bounds_that_are_the_default(fn, inside: list[float], outside: list[float]) -> None:
    assert all(values(fn, [ratio]) != [[0.0]] for ratio in inside)
    assert values(fn, *([ratio] for ratio in outside)) == [[0.0]] * len(outside)
