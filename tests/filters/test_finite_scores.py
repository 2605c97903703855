"""A group with an unknown score is unknown."""

import torch

from rlprims.filters import finite_scores
from rlprims.testing import check_filter
from tests.records import Record

RECORDS = [
    Record(
        "filters.finite_scores",
        check_filter,
        exempt={"equal scores are dropped": "asks whether scores are known, not whether they differ"},
    ),
]


def test_nan_and_infinity_drop_their_group_only() -> None:
    scores = torch.tensor([1.0, torch.nan, 2.0, torch.inf, 3.0, 3.0])
    got = finite_scores(scores, torch.tensor([0, 0, 1, 2, 1, 3]))
    assert got.tolist() == [False, False, True, False, True, True]
