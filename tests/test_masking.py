"""Masked means absent, and what does not fit is named."""

from typing import Literal

import pytest
import torch

from rlprims.masking import (
    check_choice,
    check_logits,
    check_sequences,
    check_temperature,
    check_tokens,
    masked_mean,
    zero_outside,
)

MASK = torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize("shape", [(3, 4), (100, 90)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_outside_the_mask_neither_value_nor_gradient_is_read(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(shape, generator=generator) < 0.5
    x = torch.where(mask, torch.randn(shape, generator=generator), torch.nan).to(dtype).requires_grad_()
    got = zero_outside(x, mask)
    assert got.dtype is torch.promote_types(dtype, torch.float32)
    assert torch.equal(got[mask], x[mask].to(got.dtype))
    assert (got[~mask] == 0).all()
    upstream = torch.where(mask, torch.randn(shape, generator=generator), torch.inf).to(got.dtype)
    (grad,) = torch.autograd.grad(got, x, upstream)
    assert torch.equal(grad[mask], upstream[mask].to(dtype))
    assert (grad[~mask] == 0).all()


def test_the_mean_of_nothing_is_zero() -> None:
    assert masked_mean(torch.full((2, 2), torch.nan), torch.zeros(2, 2, dtype=torch.bool)) == 0


@pytest.mark.parametrize(
    ("mask", "cu", "data", "message"),
    [
        (MASK.float(), None, {}, r"response_mask has dtype torch\.float32, expected torch\.bool"),
        (MASK[0], None, {}, r"response_mask has shape \(3,\), expected \(B, T\).*cu_seqlens"),
        (MASK, torch.tensor([0, 6]), {}, r"response_mask has shape \(2, 3\).*cu_seqlens is given"),
        (MASK[0], torch.tensor([0.0, 3.0]), {}, r"cu_seqlens.*expected integers \(B\+1,\)"),
        (MASK[0], torch.tensor([[0, 3]]), {}, r"cu_seqlens.*expected integers \(B\+1,\)"),
        (MASK[0], torch.zeros(0, dtype=torch.int64), {}, r"cu_seqlens.*expected integers \(B\+1,\)"),
        (MASK[0], torch.tensor([0, 2]), {}, "cu_seqlens runs from 0 to 2, expected 0 to 3"),
        (MASK[0], torch.tensor([0, 3, 2, 3]), {}, "cu_seqlens decreases"),
        (MASK, None, {"rewards": torch.zeros(2, 1)}, r"rewards has shape \(2, 1\), response_mask has \(2, 3\)"),
    ],
)
def test_what_does_not_fit_is_named(mask: torch.Tensor, cu: torch.Tensor, data: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tokens(mask, cu, **data)


def test_one_entry_per_sequence() -> None:
    check_sequences(MASK, None, scores=torch.zeros(2))
    check_sequences(MASK[0], torch.tensor([0, 1, 3]), scores=torch.zeros(2))
    with pytest.raises(ValueError, match=r"scores has shape \(3,\), expected \(2,\)"):
        check_sequences(MASK, None, scores=torch.zeros(3))


def test_an_option_is_one_of_its_choices() -> None:
    choices = Literal["token", "sequence"]
    check_choice("level", "token", choices)
    with pytest.raises(ValueError, match="level='tokens', expected 'token' or 'sequence'"):
        check_choice("level", "tokens", choices)


def test_logits_are_floats_and_a_temperature_is_above_zero() -> None:
    check_logits(torch.zeros(3), 0.5)
    with pytest.raises(ValueError, match="logits has shape"):
        check_logits(torch.zeros(3, dtype=torch.int64), 1.0)
    for temperature in (0.0, -1.0):
        with pytest.raises(ValueError, match="temperature="):
            check_temperature(temperature)
