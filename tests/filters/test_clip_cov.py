"""A few tokens of the covariance band are dropped, the same ones wherever they stand."""

import pytest
import torch

from rlprims.filters import clip_cov
from rlprims.layout import unpack
from rlprims.testing import check_selector
from tests.records import Record, many_more
from tests.records_transforms import OF_DTENSORS

A_GENERATOR = (
    *("vmap is a loop", "one graph for all batch sizes", "packed tokens compile", "one graph for all packed batches"),
    *("exports with a dynamic batch", "exports packed with a dynamic batch"),
    *OF_DTENSORS,
)
"""Laws of transforms that carry no state of a torch.Generator."""

RECORDS = [
    Record(
        "filters.clip_cov",
        check_selector,
        call={"fraction": 0.2, "low": -1.0, "high": 1.0},
        matters={
            **{"fraction": 0.4, "low": 0.0, "high": 0.1, "generator": torch.Generator().manual_seed(1)},
            **{"all_reduce": many_more, "tokens_before": 1},
        },
        exempt={
            "rows may be permuted": "the draw goes by the place of a token among the valid ones",
            "a batch may be spread": "the draw goes by the place of a token among the valid ones of all ranks",
            **dict.fromkeys(A_GENERATOR, "draws by a torch.Generator, whose state no transform carries"),
        },
    ),
]

TOKENS = 4000
CU = torch.tensor([0, 1000, 1700, 1700, TOKENS])
NOISE = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MASK = torch.rand(TOKENS, generator=torch.Generator().manual_seed(1)) < 0.9
LOG_PROBS, A = NOISE


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dropped(seed: int = 0, **options: float) -> torch.Tensor:
    return MASK & ~clip_cov(LOG_PROBS, A, MASK, CU, generator=generator(seed), **options)


def covariance() -> torch.Tensor:
    return (LOG_PROBS - LOG_PROBS[MASK].mean()) * (A - A[MASK].mean())


def test_clip_cov_drops_only_tokens_of_the_band() -> None:
    drop = dropped(fraction=0.02, low=1.0, high=2.0)
    assert drop.sum() == int(0.02 * int(MASK.sum()))
    assert covariance()[drop].min() > 1.0
    assert covariance()[drop].max() < 2.0


def test_at_least_one_is_dropped_and_at_most_the_band() -> None:
    assert dropped(fraction=1e-6).sum() == 1
    assert torch.equal(dropped(fraction=1.0), MASK & (covariance() > 1.0) & (covariance() < 5.0))
    assert not dropped(low=100.0, high=200.0).any()


def test_another_seed_draws_others_and_the_generator_moves_on() -> None:
    moving = generator()
    first, second = (clip_cov(LOG_PROBS, A, MASK, CU, fraction=0.02, generator=moving) for _ in range(2))
    assert torch.equal(MASK & ~first, dropped(fraction=0.02))
    assert not torch.equal(first, second)
    assert not torch.equal(dropped(0, fraction=0.02), dropped(1, fraction=0.02))


def test_the_draw_is_the_same_padded_and_packed() -> None:
    rows = [unpack(x, CU, 2500) for x in (LOG_PROBS, A, MASK)]
    padded = clip_cov(*rows, fraction=0.02, generator=generator())
    packed = clip_cov(LOG_PROBS, A, MASK, CU, fraction=0.02, generator=generator())
    assert torch.equal(padded, unpack(packed, CU, 2500))


def test_clip_cov_draws_every_token_of_the_band_as_often() -> None:
    """400 draws of a tenth of 200 tokens: each is drawn 40 times, with a deviation of sqrt(400 · 0.1 · 0.9) = 6."""
    x = torch.linspace(-2, 2, 200, dtype=torch.float64)[None]
    mask = torch.ones_like(x, dtype=torch.bool)
    drops = sum(
        (~clip_cov(x, x, mask, fraction=0.1, low=-9.0, high=9.0, generator=generator(seed))).double()
        for seed in range(400)
    )
    assert drops.mean().item() == pytest.approx(40.0)
    assert (drops - 40).abs().max() < 5 * 6
    assert 4.5 < drops.std() < 7.5


@pytest.mark.parametrize(
    ("blamed", "options"),
    [
        ("generator", {"generator": None}),
        ("fraction", {"generator": generator(), "fraction": 0.0}),
        ("low", {"generator": generator(), "low": 5.0}),
    ],
)
def test_wrong_options_are_refused(blamed: str, options: dict) -> None:
    with pytest.raises(ValueError, match=blamed):
        clip_cov(LOG_PROBS, A, MASK, CU, **options)
