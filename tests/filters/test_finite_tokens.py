"""Log-probs of the sampler that are no numbers: such tokens are left out, or weigh 1, by the name of the function."""

import torch

from rlprims.corrections import replace_nonfinite, tis
from rlprims.filters import finite_tokens
from rlprims.losses import clipped_surrogate, token_mean
from rlprims.testing import check_selector
from tests.records import Record

RECORDS = [
    Record("filters.finite_tokens", check_selector),
]

NAN, INF = torch.nan, torch.inf
MASK = torch.tensor([[True, True, True, False], [True, True, True, True]])
OLD = torch.full((2, 4), -1.0)
ROLLOUT = torch.tensor([[-1.0, NAN, -INF, NAN], [-1.0, -1.0, INF, -1.0]])
ADVANTAGES = torch.ones(2, 4)


def gradient(mask: torch.Tensor, rollout: torch.Tensor) -> torch.Tensor:
    log_probs = OLD.clone().requires_grad_()
    losses = clipped_surrogate(log_probs, OLD, ADVANTAGES, mask) * tis(OLD, rollout, mask).values
    (slope,) = torch.autograd.grad(token_mean(losses, mask), log_probs)
    return slope


def test_dropped_from_the_loss_and_from_its_denominator() -> None:
    """torchtitan PR#4174: seven valid tokens, three of them without a number, so each of four weighs a quarter."""
    mask = finite_tokens(ROLLOUT, MASK)
    assert mask.tolist() == [[True, False, False, False], [True, True, False, True]]
    torch.testing.assert_close(gradient(mask, ROLLOUT), -0.25 * mask.float())


def test_kept_with_weight_one() -> None:
    """TRL: all seven tokens count, and where the sampler has no number the trainer's own stands."""
    filled = replace_nonfinite(ROLLOUT, OLD, MASK)
    assert filled.isfinite().all()
    torch.testing.assert_close(gradient(MASK, filled), -MASK.float() / 7)


def test_without_either_the_step_is_lost() -> None:
    assert gradient(MASK, ROLLOUT).isnan().any()


def test_numbers_stay_as_they_are() -> None:
    rollout = torch.tensor([[-0.5, NAN, -3.0, 7.0], [-1.0, -2.0, -700.0, -1.5]])
    filled = replace_nonfinite(rollout, OLD, MASK)
    assert filled.tolist() == [[-0.5, -1.0, -3.0, 0.0], [-1.0, -2.0, -700.0, -1.5]]
