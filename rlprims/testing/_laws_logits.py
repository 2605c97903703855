"""Laws of functions of logits (..., V): rows are independent, a common shift cancels, banned tokens are allowed."""

import torch
from torch import Tensor

from rlprims.testing._compare import assert_close, assert_zero
from rlprims.testing._primitive import Primitive

FLOAT32 = 1e-6
EXACT = 1e-12
VOCAB = 11


def _tokens(logits: Tensor) -> Tensor:
    count = logits[..., 0].numel() if logits.shape[-1] else 0
    return (torch.arange(count) * 7 % logits.shape[-1]).reshape(logits.shape[:-1])


def _logits(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return 3 * torch.randn(*shape, VOCAB, generator=generator, dtype=dtype)


def _of(p: Primitive, logits: Tensor) -> Tensor:
    data = {"logits": logits, "token_ids": _tokens(logits)}
    value: Tensor = p.fn(**{name: data[name] for name in p.inputs}, **p.hyperparameters)
    return value


def _gradient(p: Primitive, logits: Tensor, cotangent: Tensor) -> Tensor:
    x = logits.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(_of(p, x), x, cotangent)
    return gradient


def any_leading_shape(p: Primitive) -> None:
    """(B, T, V), (N, V) and (V,) give the same numbers; no rows give no numbers."""
    logits = _logits(3, 5)
    assert_close("the value of flattened rows", _of(p, logits.flatten(0, 1)), _of(p, logits).flatten(), 0)
    assert _of(p, _logits(4)[0]).shape == (), "a single row (V,) must give a scalar ()"
    assert _of(p, _logits(0)).shape == (0,), "no rows (0, V) must give (0,)"
    assert _of(p, _logits(2, 0)).shape == (2, 0), "(2, 0, V) must give (2, 0)"


def a_shift_of_logits_cancels(p: Primitive) -> None:
    """A constant added to the logits of a row does not change the result."""
    logits = _logits(6)
    shift = torch.linspace(-50, 50, 6, dtype=torch.float64)[:, None]
    assert_close("the value of shifted logits", _of(p, logits + shift), _of(p, logits), EXACT)


def banned_tokens_are_legal(p: Primitive) -> None:
    """With logits of −inf the result and its gradient are finite; the gradient of such logits is 0."""
    logits = _logits(6)
    banned = torch.arange(VOCAB) != _tokens(logits)[:, None]
    banned &= (torch.arange(VOCAB) % 2 == 0) | (torch.arange(6) > 3)[:, None]
    masked = logits.masked_fill(banned, -torch.inf)
    value = _of(p, masked)
    assert bool(value.isfinite().all()), f"banned tokens give {value.tolist()}"
    assert_zero("the value of a row with one token left", value[4:])
    gradient = _gradient(p, masked, torch.ones(6, dtype=torch.float64))
    assert bool(gradient.isfinite().all()), "the gradient of a row with banned tokens is not finite"
    assert_zero("the gradient of a banned token", gradient[banned])


def unread_rows_get_no_gradient(p: Primitive) -> None:
    """A row whose result is not used gets gradient exactly 0, even if it contains NaN or Inf."""
    for poison in (torch.nan, torch.inf, -torch.inf, 1e38):
        logits = _logits(6, dtype=torch.float32)
        cotangent = torch.tensor([1.0, 0.0, 2.0, 0.0, 0.0, 1.0])
        want = _gradient(p, logits, cotangent)
        logits[cotangent == 0] = poison
        got = _gradient(p, logits, cotangent)
        assert_zero(f"the gradient of a row of {poison} whose result is not used", got[cotangent == 0])
        assert_close(f"the gradient of other rows beside one of {poison}", got, want, 0)


def float32_whatever_comes_in(p: Primitive) -> None:
    """bf16 and fp16 logits are reduced in float32: the result is within 1e-6 of the float64 one."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = _logits(40).to(dtype)
        got = _of(p, logits)
        assert got.dtype is torch.float32, f"{dtype} in gives {got.dtype}, expected float32"
        assert_close(f"the value of {dtype} logits", got.double(), _of(p, logits.double()), FLOAT32)
