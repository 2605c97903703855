"""Statistics of large groups and of large scores, against exactly rounded sums."""

import math

import pytest
import torch
from torch import Tensor

from rlprims.advantage import gdpo, gpg, grpo, opo, reinforce_pp_baseline, rloo, spo, whiten
from rlprims.grouping import dense_ids, group_mean, group_mean_of_others, group_std, group_sum

ROWS = 100_000


def z_scores(scores: Tensor, **options: object) -> Tensor:
    mask = torch.ones(len(scores), 1, dtype=torch.bool)
    return grpo(scores[:, None], torch.zeros(len(scores), dtype=torch.int64), mask, **options)[:, 0]


def test_a_group_of_100_000_rewards_of_0_and_1() -> None:
    """The mean is k / n, and the deviation sqrt(k (n − k) / (n (n − 1)))."""
    rewards = (torch.rand(ROWS, generator=torch.Generator().manual_seed(0)) < 0.3).float()
    passed = int(rewards.sum())
    std = math.sqrt(passed * (ROWS - passed) / (ROWS * (ROWS - 1)))
    want = {1.0: (1 - passed / ROWS) / std, 0.0: -passed / ROWS / std}
    got = z_scores(rewards, eps=0.0)
    for reward, z in want.items():
        assert got[rewards == reward].min().item() == pytest.approx(z, rel=1e-6)
        assert got[rewards == reward].max().item() == pytest.approx(z, rel=1e-6)


def test_sums_and_means_of_a_group_of_100_000_float32() -> None:
    x = torch.rand(ROWS, generator=torch.Generator().manual_seed(1)) + 1000
    ids = torch.zeros(ROWS, dtype=torch.int64)
    mean = math.fsum(x.tolist()) / ROWS
    assert group_sum(x, ids)[0].item() == pytest.approx(ROWS * mean, rel=1e-7)
    assert group_mean(x, ids)[0].item() == pytest.approx(mean, rel=1e-7)
    variance = math.fsum((y - mean) ** 2 for y in x.tolist()) / (ROWS - 1)
    assert group_std(x, ids)[0].item() == pytest.approx(math.sqrt(variance), rel=1e-6)


@pytest.mark.parametrize("size", [1e-10, 1.0, 1e20, 1e30, 1e37])
@pytest.mark.parametrize("std_over", ["group", "batch", "batch_centred"])
def test_the_z_score_of_scores_of_any_size(size: float, std_over: str) -> None:
    """It does not depend on the unit of the score; 1e30 gave 0, because its square is infinite in float32."""
    scores = size * torch.tensor([1.0, 0.0, 0.0, -2.0])
    want = z_scores(torch.tensor([1.0, 0.0, 0.0, -2.0]), eps=0.0, std_over=std_over)
    assert want.tolist() == pytest.approx(
        [1.25 / (19 / 12) ** 0.5, *[0.25 / (19 / 12) ** 0.5] * 2, -1.75 / (19 / 12) ** 0.5]
    )
    got = z_scores(scores, eps=0.0, std_over=std_over, tolerance=0.0)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1e20, 1e30, 1e37])
def test_whitening_of_advantages_of_any_size(size: float) -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    got = whiten(size * torch.tensor([[1.0, 2.0, 4.0]]), mask)
    assert got[0].tolist() == pytest.approx([-4 / 21**0.5, -1 / 21**0.5, 5 / 21**0.5])


@pytest.mark.parametrize("size", [1e30, 1e37])
def test_group_estimators_of_large_scores(size: float) -> None:
    """Those that divide by a deviation do not depend on the unit, and the others have it."""
    scores, ids = torch.tensor([1.0, 0.0, 0.5, 2.0])[:, None], torch.tensor([0, 0, 1, 1])
    mask = torch.ones_like(scores, dtype=torch.bool)
    for f, unit in (
        (rloo, size),
        (gpg, size),
        (opo, size),
        (reinforce_pp_baseline, 1.0),
        (spo_of_zero, 1.0),
        (gdpo, 1.0),
    ):
        want, got = f(scores, ids, mask), f(size * scores, ids, mask)
        torch.testing.assert_close(got / unit, want, rtol=1e-5, atol=1e-5, msg=f.__name__)


def spo_of_zero(rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
    return spo(rewards, torch.zeros(len(rewards)), mask)


def test_the_mean_of_the_others_is_that_of_the_group_without_the_row() -> None:
    x, labels = [3.0, 1.0, 4.0, 1.5, 9.0, 2.5], "abaaab"
    ids = dense_ids(labels)
    valid = [True, True, False, True, True, True]
    for rows in (None, torch.tensor(valid)):
        got = group_mean_of_others(torch.tensor(x, dtype=torch.float64), ids, rows)
        for i, label in enumerate(labels):
            others = [x[j] for j in range(6) if j != i and labels[j] == label and (rows is None or valid[j])]
            assert got[i].item() == pytest.approx(sum(others) / len(others), rel=1e-14)
    assert group_mean_of_others(torch.tensor([7.0]), torch.tensor([0])).tolist() == [7.0]
