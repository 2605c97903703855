"""One random batch with every input that a loss can ask for, and the calls of all losses on it."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlprims import losses
from rlprims.types import PerSequence

Loss = Callable[..., Tensor]

ROWS, WIDTH, VOCABULARY = 4, 5, 7
LOG_PROBS = [f"{prefix}log_probs" for prefix in ("", "old_", "rollout_", "ref_", "teacher_")]
ENTRIES = ["advantages", "new_values", "values", "returns", "entropies"]
ROWS_OF_LOGITS = ["logits", "ref_logits", "teacher_logits"]
DIFFERENTIABLE = ["log_probs", "logits", "topk_log_probs", "new_values", "entropies"]
"""What per-token losses have a gradient to; each takes exactly one of them."""

PER_TOKEN: dict[str, Loss] = {
    name: getattr(losses, name)
    for name in losses.__all__
    if set(DIFFERENTIABLE) & set(inspect.signature(getattr(losses, name)).parameters)
    and inspect.signature(getattr(losses, name)).return_annotation is not PerSequence
}


def batch(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Padded, with holes in the mask; log-ratios of up to about 1."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(ROWS, WIDTH, *shape, generator=generator, dtype=torch.float64)

    log_probs = -noise().abs()
    data = {name: log_probs - 0.3 * noise().abs() for name in LOG_PROBS}
    data |= {name: noise() for name in ENTRIES}
    data |= {name: 2 * noise(VOCABULARY) for name in ROWS_OF_LOGITS}
    data |= {f"{who}topk_log_probs": (2 * noise(VOCABULARY)).log_softmax(-1)[..., :3] for who in ("", "teacher_")}
    data = {name: x.to(dtype) for name, x in data.items()}
    data["response_mask"] = torch.rand(ROWS, WIDTH, generator=generator) < 0.7
    data["expert_mask"] = torch.rand(ROWS, WIDTH, generator=generator) < 0.5
    data["group_ids"] = torch.tensor([2, 2, 2, 0])
    return data


def pack(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tokens as packed sequences of WIDTH tokens."""
    packed = {name: x.flatten(0, 1) if x.dim() > 1 else x for name, x in data.items()}
    return packed | {"cu_seqlens": torch.arange(ROWS + 1) * WIDTH}


def poison(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """NaN, infinities and 1e38 wherever the mask is False."""
    mask = data["response_mask"]
    values = (
        torch.tensor([torch.nan, torch.inf, -torch.inf, 1e38]).repeat(mask.numel())[: mask.numel()].view(mask.shape)
    )

    def poisoned(x: Tensor) -> Tensor:
        extra = (1,) * (x.dim() - mask.dim())
        return torch.where(mask.view(*mask.shape, *extra), x, values.to(x.dtype).view(*mask.shape, *extra))

    return {name: poisoned(x) if x.is_floating_point() else x for name, x in data.items()}


def arguments_of(loss: Loss, data: dict[str, Tensor], **options: Any) -> tuple[str, dict[str, Any]]:
    """The name of the differentiable input, and all arguments."""
    parameters = inspect.signature(loss).parameters
    arguments = {
        name: x
        for name, x in data.items()
        if name in parameters and parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY
    }
    (name,) = set(DIFFERENTIABLE) & set(arguments)
    return name, {**arguments, **options}


def function_of(loss: Loss, data: dict[str, Tensor], **options: Any) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The loss as a function of its differentiable input alone, and that input."""
    name, arguments = arguments_of(loss, data, **options)
    x = arguments.pop(name)
    return lambda x: loss(**{name: x}, **arguments), x
