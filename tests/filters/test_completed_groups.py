"""Groups without, or with few, responses that were cut off."""

import pytest
import torch

from rlprims.filters import completed_groups
from rlprims.testing import check_filter
from tests.records import Record

RECORDS = [
    Record(
        "filters.completed_groups",
        check_filter,
        matters={"max_share": 0.5, "reasons": ("length",)},
        exempt=dict.fromkeys(("equal scores are dropped", "unknown scores are dropped"), "reads no scores"),
    ),
]

ENDED = torch.tensor([0, 0, 0, 0, 0, 1, 0, 3, 5, 7], dtype=torch.int8)
IDS = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 3])


@pytest.mark.parametrize(
    ("max_share", "groups"),
    [(0.0, [1, 0, 0, 0]), (0.3, [1, 0, 0, 0]), (1 / 3, [1, 1, 0, 0]), (0.5, [1, 1, 1, 0]), (0.99, [1, 1, 1, 0])],
)
def test_shares(max_share: float, groups: list[int]) -> None:
    assert completed_groups(ENDED, IDS, max_share=max_share).tolist() == [bool(groups[i]) for i in IDS.tolist()]


@pytest.mark.parametrize("max_share", [1.0, -0.1])
def test_a_share_of_all_or_less_than_none_is_refused(max_share: float) -> None:
    with pytest.raises(ValueError, match="max_share"):
        completed_groups(ENDED, IDS, max_share=max_share)


def test_some_reasons_alone() -> None:
    assert completed_groups(ENDED, IDS, reasons=("length",)).tolist() == [i != 1 for i in IDS.tolist()]
    assert completed_groups(ENDED, IDS, reasons=()).all()


def test_a_flag_is_no_reason() -> None:
    with pytest.raises(ValueError, match=r"ended has shape .* expected integers"):
        completed_groups(ENDED.bool(), IDS)
    with pytest.raises(ValueError, match="reasons='tired', expected 'stop' or 'length'"):
        completed_groups(ENDED, IDS, reasons=("tired",))


@pytest.mark.parametrize("count", [3, 10, 30, 100])
def test_the_order_of_the_rows_does_not_decide_at_an_exact_bound(count: int) -> None:
    """A rounded mean was compared: one of ten with max_share 0.1 was dropped if it was the last row."""
    ids = torch.zeros(count, dtype=torch.int64)
    for cut in range(1, count):
        flags = (torch.arange(count) < cut).to(torch.int8)
        below, at = cut / count - 1e-9, cut / count
        for rows in (flags, flags.flip(0), flags[torch.randperm(count, generator=torch.Generator().manual_seed(cut))]):
            assert completed_groups(rows, ids, max_share=at).all()
            assert not completed_groups(rows, ids, max_share=below).any()
    assert completed_groups(
        torch.tensor([0] * 71 + [1] * 29), torch.zeros(100, dtype=torch.int64), max_share=0.29
    ).all()
