"""A function under test: what its signature asks for, how it is called, and what came out."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlprims.testing._cases import VOCABULARY, Batch, Layout, layout_of, pack_tokens

DIFFERENTIABLE = (
    *("log_probs", "new_values", "entropies", "losses"),
    *("logits", "topk_log_probs", "chosen_log_probs", "rejected_log_probs", "sequence_log_probs"),
)
"""What losses and aggregations are minimized through; everything else is a constant to them."""

_STEP_WIDE = ("cu_seqlens", "totals", "group_tokens")


@dataclass(frozen=True)
class Outcome:
    """A value and the gradients of its product with a fixed cotangent, and how the value is laid out."""

    value: Tensor
    layout: Layout | None
    gradients: dict[str, Tensor]

    def map(self, tokens: Callable[[Tensor], Tensor], rows: Callable[[Tensor], Tensor]) -> "Outcome":
        change: dict[Layout | None, Callable[[Tensor], Tensor]] = {"token": tokens, "row": rows, None: lambda x: x}
        gradients = {name: change[layout_of(name)](g) for name, g in self.gradients.items()}
        return Outcome(change[self.layout](self.value), self.layout, gradients)

    def columns(self, index: slice | Tensor) -> "Outcome":
        return self.map(lambda x: x[:, index], lambda x: x)

    def rows(self, index: slice | Tensor) -> "Outcome":
        return self.map(lambda x: x[index], lambda x: x[index])

    def tokens(self, mask: Tensor) -> "Outcome":
        return self.map(lambda x: x[mask], lambda x: x)

    def pack(self, lengths: Tensor) -> "Outcome":
        return self.map(lambda x: pack_tokens(x, lengths), lambda x: x)


@dataclass(frozen=True)
class Primitive:
    """A function, the hyperparameters it is called with, and other values of them that must make a difference."""

    fn: Callable[..., Any]
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    alternatives: Mapping[str, Any] = field(default_factory=dict)
    differentiable: tuple[str, ...] = ()

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.fn).parameters

    @property
    def data(self) -> tuple[str, ...]:
        """The names before ``*``."""
        return tuple(name for name, p in self.parameters.items() if p.kind is not p.KEYWORD_ONLY)

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(name for name in self.data if self.parameters[name].default is inspect.Parameter.empty)

    @property
    def optional(self) -> tuple[str, ...]:
        """Optional data of the rows or tokens at hand."""
        return tuple(name for name in self.data if name not in self.required and name not in _STEP_WIDE)

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.required + self.optional

    @property
    def variants(self) -> tuple[tuple[str, ...], ...]:
        """Which data to call it with: what it requires, and that with everything optional."""
        return (self.required, self.inputs) if self.optional else (self.required,)

    def check_vocabulary(self) -> None:
        unknown = [name for name in self.inputs if name not in VOCABULARY]
        if unknown:
            raise ValueError(
                f"{unknown[0]!r} before * is not in the vocabulary, which is {', '.join(VOCABULARY)}, cu_seqlens and "
                "totals: rename it, or put it after * if it is a hyperparameter"
            )

    def call(self, batch: Batch, names: tuple[str, ...], **changes: Any) -> Any:
        """The function on these data of the batch; ``changes`` override hyperparameters and data."""
        data = {name: batch.data[name] for name in names}
        if batch.packed:
            assert "cu_seqlens" in self.data, "takes no cu_seqlens, so its sequences cannot be packed"
            data["cu_seqlens"] = batch.data["cu_seqlens"]
        return self.fn(**{**data, **self.hyperparameters, **changes})

    def run(self, batch: Batch, names: tuple[str, ...], **changes: Any) -> Outcome:
        """Call it on fresh leaves; value and gradients."""
        leaves = {
            name: batch.data[name].detach().clone().requires_grad_() for name in names if name in self.differentiable
        }
        value = self.call(batch.replace(**leaves), names, **changes)
        assert isinstance(value, Tensor), f"returned {type(value).__name__}, needs one Tensor"
        layout = _layout(value, batch)
        gradients: dict[str, Tensor] = {}
        if leaves:
            assert value.requires_grad, f"the result is cut off from the graph of {', '.join(leaves)}"
            cotangent = torch.ones_like(value) if layout is None else batch.data[f"{layout}_cotangent"].to(value.dtype)
            found = torch.autograd.grad(value, tuple(leaves.values()), cotangent, allow_unused=True)
            gradients = {
                name: torch.zeros_like(x) if g is None else g
                for (name, x), g in zip(leaves.items(), found, strict=True)
            }
        return Outcome(value.detach(), layout, gradients)


def _layout(value: Tensor, batch: Batch) -> Layout | None:
    rows = batch.data["group_ids"].shape
    shapes: dict[tuple[int, ...], Layout | None] = {(): None, tuple(rows): "row", tuple(batch.mask.shape): "token"}
    assert tuple(value.shape) in shapes, (
        f"the result has shape {tuple(value.shape)}, needs {tuple(batch.mask.shape)} (per token), "
        f"{tuple(rows)} (per row) or () (a scalar)"
    )
    return shapes[tuple(value.shape)]
