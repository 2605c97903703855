"""The tokens whose log-prob and advantage go together most."""

import pytest
import torch

from rlprims.filters import kl_cov
from rlprims.testing import check_selector
from tests.records import Record, many_more

RECORDS = [
    Record("filters.kl_cov", check_selector, matters={"fraction": 0.5, "all_reduce": many_more}),
]

# Means −2 and 1. Covariances: 1·2, 1·(−2), (−1)·(−1), (−1)·1, a masked one, and 0·0.
LOG_PROBS = torch.tensor([[-1.0, -1.0, -3.0], [-3.0, -99.0, -2.0]], dtype=torch.float64)
A = torch.tensor([[3.0, -1.0, 0.0], [2.0, 99.0, 1.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, False, True]])


@pytest.mark.parametrize(
    ("fraction", "want"),
    [(2e-4, [(0, 0)]), (0.4, [(0, 0), (0, 2)]), (0.59, [(0, 0), (0, 2)]), (0.6, [(0, 0), (0, 2), (1, 2)])],
)
def test_by_hand(fraction: float, want: list[tuple[int, int]]) -> None:
    chosen = kl_cov(LOG_PROBS, A, MASK, fraction=fraction)
    assert [tuple(place) for place in chosen.nonzero().tolist()] == want


def test_the_whole_step_is_the_measure() -> None:
    """In a micro-batch of its own every response would have a token to penalize."""
    assert not kl_cov(LOG_PROBS, A, MASK)[1].any()
    assert kl_cov(LOG_PROBS[1:], A[1:], MASK[1:]).any()


def test_advantages_may_be_shifted_and_scaled() -> None:
    assert torch.equal(kl_cov(LOG_PROBS, 5 * A + 100, MASK, fraction=0.4), kl_cov(LOG_PROBS, A, MASK, fraction=0.4))


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="fraction"):
        kl_cov(LOG_PROBS, A, MASK, fraction=0.0)


def test_of_bf16_the_covariance_is_float32() -> None:
    """Rounded to bf16 after the mean is taken off, log-probs of −2.00 to −2.05 would be tied."""
    x = torch.linspace(-2.5, -2.0, 33).bfloat16().reshape(3, 11)
    a, mask = torch.linspace(-1.3, 1.7, 33).reshape(11, 3).T.contiguous().bfloat16(), torch.ones(3, 11) > 0
    for fraction in (0.1, 0.3, 0.5, 0.7):
        chosen = kl_cov(x, a, mask, fraction=fraction)
        assert torch.equal(chosen, kl_cov(x.double(), a.double(), mask, fraction=fraction))
