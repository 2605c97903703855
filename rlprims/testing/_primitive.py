"""A function under test: its parameters, its calls, and their results."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlprims.testing._call import Call, gradients_of
from rlprims.testing._cases import LARGE, TOY, VOCABULARY, Batch, Layout, layout_of, make_batch, pack_tokens

DIFFERENTIABLE = (
    *("log_probs", "new_values", "entropies", "losses"),
    *("logits", "topk_log_probs", "chosen_log_probs", "rejected_log_probs", "sequence_log_probs"),
    *("chosen_scores", "rejected_scores", "router_logits"),
)
"""The inputs that get a gradient from losses and aggregations. All other inputs are constants."""

ESTIMATED_FROM = (
    *("rewards", "values", "new_values", "advantages", "scores", "component_scores", "baseline_scores"),
    *("potentials", "bootstrap_values", "turn_rewards", "process_rewards", "continuation_values"),
)
"""The inputs by which the laws of transforms differentiate estimators and reward functions."""

NO_CU_SEQLENS = "it has no parameter cu_seqlens, expected one for packed sequences"

_STEP_WIDE = ("cu_seqlens", "totals", "group_tokens", "row_tokens", "trajectory_tokens")


@dataclass(frozen=True)
class CallOutcome:
    """A value, its layout, and the gradients of its product with a fixed cotangent."""

    value: Tensor
    layout: Layout | None
    gradients: dict[str, Tensor]

    def map(self, tokens: Callable[[Tensor], Tensor], rows: Callable[[Tensor], Tensor]) -> "CallOutcome":
        change: dict[Layout | None, Callable[[Tensor], Tensor]] = {"token": tokens, "row": rows, None: lambda x: x}
        gradients = {name: change[layout_of(name)](g) for name, g in self.gradients.items()}
        return CallOutcome(change[self.layout](self.value), self.layout, gradients)

    def columns(self, index: slice | Tensor) -> "CallOutcome":
        return self.map(lambda x: x[:, index], lambda x: x)

    def rows(self, index: slice | Tensor) -> "CallOutcome":
        return self.map(lambda x: x[index], lambda x: x[index])

    def tokens(self, mask: Tensor) -> "CallOutcome":
        return self.map(lambda x: x[mask], lambda x: x)

    def pack(self, lengths: Tensor) -> "CallOutcome":
        return self.map(lambda x: pack_tokens(x, lengths), lambda x: x)


@dataclass(frozen=True)
class Primitive:
    """A function, its hyperparameters, and alternative values of them that must change the result."""

    fn: Callable[..., Any]
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    alternatives: Mapping[str, Any] = field(default_factory=dict)
    differentiable: tuple[str, ...] = ()
    transformed: tuple[str, ...] = ()
    """Further inputs by which the laws of transforms differentiate."""

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
        """Optional data per row or token."""
        known = (name for name in self.data if name in VOCABULARY and name not in _STEP_WIDE)
        return tuple(name for name in known if name not in self.required)

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.required + self.optional

    @property
    def variants(self) -> tuple[tuple[str, ...], ...]:
        """The sets of data to call it with: the required data, and all data."""
        return (self.required, self.inputs) if self.optional else (self.required,)

    @property
    def is_differentiable(self) -> bool:
        """Whether it has inputs to differentiate by and returns floats."""
        call = self.sample(*TOY)
        try:
            return bool(call.inputs) and call().is_floating_point()
        except Exception:  # a law will report it
            return bool(call.inputs)

    @cached_property
    def is_by_position(self) -> bool:
        """Whether it needs no ``cu_seqlens``: it has none, and flattened tokens give the flattened result."""
        if "cu_seqlens" in self.data or any(layout_of(name) != "token" for name in self.inputs):
            return False
        data = {name: make_batch(0).data[name] for name in self.required}
        try:
            flat = self.fn(**{name: x.flatten() for name, x in data.items()}, **self.hyperparameters)
            padded = self.fn(**data, **self.hyperparameters)
        except Exception:  # a law will report it
            return False
        return flat.dim() == 1 and padded.dim() == 2 and torch.allclose(flat, padded.flatten(), equal_nan=True)

    @property
    def layouts(self) -> tuple[str, ...]:
        """``padded``, and ``packed`` if it has a parameter ``cu_seqlens``."""
        return ("padded", "packed") if "cu_seqlens" in self.data else ("padded",)

    def sample(self, rows: int, width: int, *, seed: int = 0, layout: str = "padded", full: bool = True) -> Call:
        """A call on a random batch. Packed batches of one size have the same ``cu_seqlens``."""
        names = self.variants[-1 if full else 0]
        batch = make_batch(seed, rows=rows, width=width)
        if layout == "packed":
            batch = make_batch(seed, rows=rows, width=width, integers=0).pack()
            names = (*names, "cu_seqlens")
        data = {name: batch.data[name].clone() for name in names}
        inputs = tuple(name for name in names if name in (*self.differentiable, *self.transformed))
        return Call(self.fn, self.hyperparameters, data, inputs, f"{layout} ({rows}, {width})")

    def samples(self) -> Iterator[Call]:
        """The toy and the large batch in each layout; the padded toy with and without optional data."""
        if self.optional:
            yield self.sample(*TOY, full=False)
        for layout in self.layouts:
            yield self.sample(*TOY, layout=layout)
            yield self.sample(*LARGE, layout=layout)

    def few_samples(self) -> Iterator[Call]:
        """Each size and each layout once: the large batch padded, the toy packed."""
        yield self.sample(*LARGE)
        yield self.sample(*TOY, layout=self.layouts[-1])

    def check_vocabulary(self) -> None:
        unknown = [name for name in self.data if name not in VOCABULARY and name not in _STEP_WIDE]
        if unknown:
            raise ValueError(
                f"{unknown[0]!r} before * is not in the vocabulary, which is {', '.join(VOCABULARY)}, cu_seqlens and "
                "totals: rename it, or put it after * if it is a hyperparameter"
            )

    def call(self, batch: Batch, names: tuple[str, ...], **changes: Any) -> Any:
        """The function on these data of the batch; ``changes`` override hyperparameters and data."""
        data = {name: batch.data[name] for name in names}
        if batch.packed and not self.is_by_position:
            assert "cu_seqlens" in self.data, NO_CU_SEQLENS
            data["cu_seqlens"] = batch.data["cu_seqlens"]
        return self.fn(**{**data, **self.hyperparameters, **changes})

    def run(self, batch: Batch, names: tuple[str, ...], **changes: Any) -> CallOutcome:
        """Call it on new leaf tensors, and return value and gradients."""
        inputs = [name for name in names if name in self.differentiable]
        leaves = {name: batch.data[name].detach().clone().requires_grad_() for name in inputs}
        value = self.call(batch.replace(**leaves), names, **changes)
        assert isinstance(value, Tensor), f"returned {type(value).__name__}, expected one Tensor"
        layout = _layout(value, batch)
        gradients: dict[str, Tensor] = {}
        if leaves:
            assert value.requires_grad, f"the result is cut off from the graph of {', '.join(leaves)}"
            cotangent = None if layout is None else batch.data[f"{layout}_cotangent"].to(value.dtype)
            gradients = gradients_of(value, leaves, cotangent)
        return CallOutcome(value.detach(), layout, gradients)


def _layout(value: Tensor, batch: Batch) -> Layout | None:
    rows, tokens, got = (tuple(x.shape) for x in (batch.data["group_ids"], batch.mask, value))
    shapes: dict[tuple[int, ...], Layout | None] = {(): None, rows: "row", tokens: "token"}
    what = f"the result has shape {got}, expected {tokens} (per token), {rows} (per row) or () (a scalar)"
    assert got in shapes, what
    return shapes[got]
