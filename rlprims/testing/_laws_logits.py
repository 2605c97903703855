"""Laws of functions of logits: rows are independent, a common shift cancels, banned tokens are allowed."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlprims.testing._call import Call
from rlprims.testing._compare import assert_close, assert_derivative, assert_zero

FLOAT32 = 1e-6
EXACT = 1e-12
VOCAB = 11


@dataclass(frozen=True)
class LogitFunction:
    """(logits (..., V)[, token_ids (...)], *, hyperparameters) → float (...)."""

    fn: Callable[..., Tensor]
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    alternatives: Mapping[str, Any] = field(default_factory=dict)
    is_differentiable = True
    layouts: ClassVar[tuple[str, ...]] = ("padded",)

    @property
    def takes_tokens(self) -> bool:
        return "token_ids" in inspect.signature(self.fn).parameters

    def __call__(self, logits: Tensor, **changes: Any) -> Tensor:
        data = {"token_ids": _tokens(logits)} if self.takes_tokens else {}
        return self.fn(logits, **{**data, **self.hyperparameters, **changes})

    def sample(self, rows: int, width: int, *, seed: int = 0, layout: str = "padded", full: bool = True) -> Call:
        logits = _logits(rows, width, seed=seed)
        data = {"logits": logits, **({"token_ids": _tokens(logits)} if self.takes_tokens else {})}
        return Call(self.fn, self.hyperparameters, data, ("logits",), f"({rows}, {width})")

    def gradient(self, logits: Tensor, cotangent: Tensor) -> Tensor:
        x = logits.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self(x), x, cotangent)
        return gradient


def _tokens(logits: Tensor) -> Tensor:
    count = logits[..., 0].numel() if logits.shape[-1] else 0
    return (torch.arange(count) * 7 % logits.shape[-1]).reshape(logits.shape[:-1])


def _logits(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + 100 * seed)
    return 3 * torch.randn(*shape, VOCAB, generator=generator, dtype=dtype)


def any_leading_shape(f: LogitFunction) -> None:
    """(B, T, V), (N, V) and (V,) give the same numbers; no rows give no numbers."""
    logits = _logits(3, 5)
    assert_close("the value of flattened rows", f(logits.flatten(0, 1)), f(logits).flatten(), 0)
    assert f(_logits(4)[0]).shape == (), "a single row (V,) must give a scalar ()"
    assert f(_logits(0)).shape == (0,), "no rows (0, V) must give (0,)"
    assert f(_logits(2, 0)).shape == (2, 0), "(2, 0, V) must give (2, 0)"


def a_shift_of_logits_cancels(f: LogitFunction) -> None:
    """A constant added to the logits of a row does not change the result."""
    logits = _logits(6)
    shift = torch.linspace(-50, 50, 6, dtype=torch.float64)[:, None]
    assert_close("the value of shifted logits", f(logits + shift), f(logits), EXACT)


def banned_tokens_are_legal(f: LogitFunction) -> None:
    """With logits of −inf the result and its gradient are finite; the gradient of such logits is 0."""
    logits = _logits(6)
    banned = torch.arange(VOCAB) != _tokens(logits)[:, None]
    banned &= (torch.arange(VOCAB) % 2 == 0) | (torch.arange(6) > 3)[:, None]
    masked = logits.masked_fill(banned, -torch.inf)
    assert bool(f(masked).isfinite().all()), f"banned tokens give {f(masked).tolist()}"
    assert_zero("the value of a row with one token left", f(masked)[4:])
    gradient = f.gradient(masked, torch.ones(6, dtype=torch.float64))
    assert bool(gradient.isfinite().all()), "the gradient of a row with banned tokens is not finite"
    assert_zero("the gradient of a banned token", gradient[banned])


def unread_rows_get_no_gradient(f: LogitFunction) -> None:
    """A row whose result is not used gets gradient exactly 0, even if it contains NaN or Inf."""
    for poison in (torch.nan, torch.inf, -torch.inf, 1e38):
        logits = _logits(6, dtype=torch.float32)
        cotangent = torch.tensor([1.0, 0.0, 2.0, 0.0, 0.0, 1.0])
        want = f.gradient(logits, cotangent)
        logits[cotangent == 0] = poison
        got = f.gradient(logits, cotangent)
        assert_zero(f"the gradient of a row of {poison} whose result is not used", got[cotangent == 0])
        assert_close(f"the gradient of other rows beside one of {poison}", got, want, 0)


def float32_whatever_comes_in(f: LogitFunction) -> None:
    """bf16 and fp16 logits are reduced in float32: the result is within 1e-6 of the float64 one."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = _logits(40).to(dtype)
        got = f(logits)
        assert got.dtype is torch.float32, f"{dtype} in gives {got.dtype}, expected float32"
        assert_close(f"the value of {dtype} logits", got.double(), f(logits.double()), FLOAT32)
    assert f(_logits(2)).dtype is torch.float64, "expected float64 out for float64 in"


def inputs_are_untouched(f: LogitFunction) -> None:
    """No argument is written to, no result is a view of it, no global generator is used."""
    logits = _logits(5)
    before, state = logits.clone(), torch.get_rng_state()
    value = f(logits)
    assert torch.equal(logits, before), "logits was written to"
    assert value.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr(), "the result is a view of logits"
    assert torch.equal(torch.get_rng_state(), state), "torch's global generator was used"


def gradient_is_the_derivative(f: LogitFunction) -> None:
    """gradcheck in float64."""
    assert_derivative("the gradient of logits", f, _logits(3, 2))


def hyperparameters_matter(f: LogitFunction) -> None:
    """Each alternative value changes the result."""
    for name, other in f.alternatives.items():
        assert not torch.equal(f(_logits(5)), f(_logits(5), **{name: other})), f"{name}={other!r} changes nothing"
