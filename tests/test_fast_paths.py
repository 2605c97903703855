"""What takes another way for large or ordered input gives the same numbers."""

import pytest
import torch

from rlprims.grouping import group_moments
from rlprims.losses import clipped_surrogate, token_sum
from rlprims.masking import zero_outside

SHAPE = (100, 90)  # beyond the size at which torch.where is used


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_large_selection_is_where_to_the_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(SHAPE, generator=generator) < 0.5
    x = torch.where(mask, torch.randn(SHAPE, generator=generator), torch.nan).to(dtype).requires_grad_()
    upstream = torch.where(mask, torch.randn(SHAPE, generator=generator), torch.inf)
    got, want = zero_outside(x, mask), torch.where(mask, x.to(torch.promote_types(dtype, torch.float32)), 0.0)
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(y, x, upstream.to(y.dtype))[0] for y in (got, want)))


def test_only_the_same_unchanged_mask_is_not_selected_by_again() -> None:
    log_probs = torch.zeros(SHAPE, requires_grad=True)
    mask = torch.ones(SHAPE, dtype=torch.bool)
    losses = clipped_surrogate(log_probs, torch.zeros(SHAPE), torch.ones(SHAPE), mask)
    assert zero_outside(losses, mask) is losses
    assert zero_outside(losses * 1, mask) is not losses
    mask[0] = False
    assert token_sum(losses, mask).item() == -99 * 90


def test_groups_in_order_have_the_moments_of_groups_that_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    x, ids = torch.randn(12, generator=generator, dtype=torch.float64), torch.arange(3).repeat_interleave(4)
    valid = torch.rand(12, generator=generator) < 0.7
    shuffled = torch.randperm(12, generator=generator)
    for rows in (None, valid):
        in_order = group_moments(x, ids, rows)
        moved = group_moments(x[shuffled], ids[shuffled], None if rows is None else rows[shuffled])
        for got, want in zip(moved, in_order, strict=True):
            torch.testing.assert_close(got, want[shuffled], rtol=0, atol=1e-14)
