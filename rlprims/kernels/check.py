"""Compare each kernel with its formula here: outputs, gradients, time. Import the modules of the formulas first."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from rlprims.kernels import ACCELERATED

TOLERANCE = 1e-5
"""The largest accepted difference, relative to the formula's largest number; float32 rounding is below 1e-6."""


class Comparison(NamedTuple):
    """The largest relative difference of outputs and gradients, and seconds of one call with its gradient."""

    difference: float
    formula_seconds: float
    kernel_seconds: float


def _log_probs(device: torch.device) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(256, 8192, generator=generator)).to(device).requires_grad_()
    return logits, torch.randint(8192, (256, 1), generator=generator).to(device), 0.7


def _head(device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 128, generator=generator).to(device) for n in (256, 8192))
    token_ids = torch.randint(8192, (256,), generator=generator).to(device)
    return hidden.requires_grad_(), (head / 8).requires_grad_(), token_ids


def _token_loss(device: torch.device) -> tuple[Any, ...]:
    hidden, head, token_ids = _head(device)
    weights, mask = torch.rand(256, device=device), torch.arange(256, device=device) % 4 > 0
    return hidden, head, token_ids, weights, mask, _weighted_log_probs, 1.0, None


def _weighted_log_probs(log_probs: Tensor, weights: Tensor, mask: Tensor, /) -> Tensor:
    return torch.where(mask, log_probs * weights, 0.0).sum()


EXAMPLES: dict[str, Callable[[torch.device], tuple[Any, ...]]] = {
    "log_probs_and_entropies": _log_probs,
    "linear_log_probs": lambda device: (*_head(device), 1.0, None),
    "linear_token_loss": _token_loss,
    "linear_divergence": lambda device: (
        *(*_head(device)[:2], tuple(x.detach().flip(0) for x in _head(device)[:2]), _token_loss(device)[4]),
        lambda logits, teacher_logits: (logits.tanh() * teacher_logits).mean(-1),
    ),
}
"""Arguments for each accelerated formula, large enough to measure the gain of a kernel."""


def compare(name: str, module: str, device: torch.device) -> Comparison:
    """Compare one kernel with its formula on the example arguments."""
    accelerated, arguments = ACCELERATED[name], EXAMPLES[name](device)
    functions = [accelerated.formula, accelerated.kernel(module)]
    expected, got = (_outputs_and_gradients(function, arguments) for function in functions)
    difference = max(_difference(x, y) for x, y in zip(got, expected, strict=True))
    return Comparison(difference, *(_seconds(function, arguments) for function in functions))


def _outputs_and_gradients(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor]:
    outputs = function(*arguments)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    leaves = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        return outputs
    total = torch.stack([x.sum() for x in outputs if x.requires_grad]).sum()
    return [*(x.detach() for x in outputs), *torch.autograd.grad(total, leaves)]


def _difference(x: Tensor, y: Tensor) -> float:
    largest = y.abs().max().clamp(min=torch.finfo(y.dtype).tiny)
    return float((x - y).abs().max() / largest)


def _seconds(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    timer = Timer("run(*given)", globals={"run": _outputs_and_gradients, "given": (function, arguments)})
    return timer.blocked_autorange(min_run_time=0.1).median  # it waits for the device
