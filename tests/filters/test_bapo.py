"""Bounds of the clip that rise until the praised tokens are enough of the objective."""

import math

import pytest
import torch
from torch import Tensor

from rlprims import losses
from rlprims.filters import bapo
from rlprims.testing import check_selector, on_ranks
from tests.records import Record


def blamed_elsewhere(x: Tensor) -> Tensor:
    """The all_reduce of a rank beside one that has nothing but blame: N has two entries, one for each c_low."""
    return x + 1000 if len(x) == 2 else x


RECORDS = [
    Record(
        "filters.bapo",
        check_selector,
        matters={
            "target": 0.9,
            "low_start": 0.3,
            "low_end": 0.6,
            "high_start": 2.9,
            "high_end": 1.2,
            "high_step": 5.0,
            "first": "low",
            "all_reduce": blamed_elsewhere,
        },
    ),
]

GENERATOR = torch.Generator().manual_seed(0)


def kept(ratios: list[float], advantages: list[float], **options) -> list[bool]:
    x = torch.tensor([ratios], dtype=torch.float64).log()
    a = torch.tensor([advantages], dtype=torch.float64)
    return bapo(x, torch.zeros_like(x), a, torch.ones_like(x, dtype=torch.bool), **options)[0].tolist()


RATIOS, ADVANTAGES = [1.25, 1.45, 0.65, 0.85, 1.0], [1.0, 1.0, -1.0, -1.0, -2.0]
"""P is 2.4 at c_high 1.2, 2.55 at 1.3, 2.65 at 1.4, 2.7 from 1.5; N is 3.5 up to c_low 0.65, 3.55 at 0.7."""


@pytest.mark.parametrize(
    ("target", "first", "want"),
    [
        (0.4, "high", [False, False, True, True, True]),  # 2.4 of 5.9 at once: PPO within (0.6, 1.2)
        (0.42, "high", [True, False, True, True, True]),  # 2.55 of 6.05
        (0.43, "high", [True, False, True, True, True]),  # 2.65 of 6.15 at 1.4
        (0.435, "high", [True, True, True, True, True]),  # 2.7 of 6.2
        (0.44, "high", [True, True, False, False, True]),  # never: both at their end
        (0.4, "low", [False, False, True, True, True]),
        (0.41, "low", [True, False, False, False, True]),  # a higher c_low only adds to N: 3.8, and 2.65 of 6.45
    ],
)
def test_by_hand(target: float, first: str, want: list[bool]) -> None:
    assert kept(RATIOS, ADVANTAGES, target=target, first=first) == want


def of_the_authors(ratio: Tensor, a: Tensor, target_ratio: float, low: list[float], high: list[float], first: str):
    """The search one step at a time, as the authors' code makes it (c_low first) and as their paper says."""
    ends, bounds = {"low": low[1], "high": high[1]}, {"low": low[0], "high": high[0]}
    steps = {"low": low[2], "high": high[2]}

    def balance() -> float:
        effective = torch.where(a >= 0, ratio.clamp(max=bounds["high"]), ratio.clamp(min=bounds["low"])) * a
        blamed = float(-effective.clamp(max=0).sum())
        return float(effective.clamp(min=0).sum()) / blamed if blamed > 0 else math.inf

    for name in ("low", "high") if first == "low" else ("high", "low"):
        while balance() < target_ratio and bounds[name] < ends[name]:
            bounds[name] = min(bounds[name] + steps[name], ends[name])
    return bounds["low"], bounds["high"]


@pytest.mark.parametrize("first", ["high", "low"])
@pytest.mark.parametrize("target_ratio", [0.3, 0.5, 0.8, 1.0, 1.3])
def test_the_gradient_is_ppos_within_the_bounds_of_the_search(first: str, target_ratio: float) -> None:
    low, high, chosen = [0.6, 0.83, 0.05], [1.2, 2.0, 0.11], set()
    for shift in (-0.4, 0.0, 0.5):
        x = torch.randn(3, 40, generator=GENERATOR, dtype=torch.float64).requires_grad_()
        old = torch.zeros_like(x).detach()
        a = torch.randn(3, 40, generator=GENERATOR, dtype=torch.float64) + shift
        m = torch.rand(3, 40, generator=GENERATOR) < 0.8
        ratio = x.detach().exp()
        c_low, c_high = of_the_authors(ratio[m], a[m], target_ratio, low, high, first)
        chosen.add((c_low, c_high))
        want = losses.token_sum(losses.clipped_surrogate(x, old, a, m, clip_low=1 - c_low, clip_high=c_high - 1), m)
        keep = bapo(
            *(x, old, a, m),
            **{"target": target_ratio / (1 + target_ratio), "first": first},
            **dict(zip(("low_start", "low_end"), low, strict=False)),
            **dict(zip(("high_start", "high_end", "high_step"), high, strict=True)),
        )
        free = losses.clipped_surrogate(x, old, a, m, clip_low=1.0, clip_high=math.inf)
        got = losses.token_sum(free * keep, m)
        torch.testing.assert_close(*(torch.autograd.grad(loss, x)[0] for loss in (got, want)))
    assert len(chosen) > 1 or target_ratio == 0.3


def test_ranks_choose_together() -> None:
    x, a = torch.randn(2, 6, 9, generator=GENERATOR, dtype=torch.float64)
    old, m = torch.zeros_like(x), torch.ones_like(x, dtype=torch.bool)
    cut = [t.split([1, 4, 1]) for t in (x, old, a, m)]
    got = on_ranks(lambda rank, *part: bapo(*part, all_reduce=rank.all_reduce), *cut)
    assert torch.equal(torch.cat(got), bapo(x, old, a, m))
    assert not torch.equal(torch.cat([bapo(*part) for part in zip(*cut, strict=True)]), bapo(x, old, a, m))


def test_bapo_of_nothing_blamed_and_of_nothing() -> None:
    assert kept([1.19, 1.21], [1.0, 1.0], target=1.0) == [True, False]
    assert kept([0.1, 9.0], [0.0, 0.0]) == [True, True]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"target": 1.5}, "the authors' ratio r is r / "),
        ({"low_end": 0.5}, "low_start=0.6, low_end=0.5, "),
        ({"high_end": 1.0}, "high_start=1.2, high_end=1.0 "),
        ({"high_step": 0.0}, "high_step=0.0"),
        ({"first": "both"}, "first='both', expected 'high' or 'low'"),
    ],
)
def test_errors(options: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        kept([1.0], [1.0], **options)
