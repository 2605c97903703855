"""A call of a function under test, for the transforms of torch: tensors by name, the batch as first dimension."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SHARED = "cu_seqlens"
"""The argument that splits packed tokens into sequences. All samples of one ``vmap`` share it."""


@dataclass(frozen=True)
class Call:
    """A function, all its arguments, and the names of those tensors that it is differentiated by."""

    fn: Callable[..., Tensor]
    hyperparameters: Mapping[str, Any]
    data: dict[str, Tensor]
    inputs: tuple[str, ...]
    label: str

    @property
    def point(self) -> dict[str, Tensor]:
        """The inputs at which derivatives are computed."""
        return {name: self.data[name] for name in self.inputs}

    def __call__(self, data: Mapping[str, Tensor] | None = None) -> Tensor:
        """The value, with some of the tensors replaced."""
        return self.fn(**{**self.data, **(data or {}), **self.hyperparameters})

    def cotangent(self) -> Tensor:
        """A fixed random tensor with the shape of the value."""
        return random_like(self().detach(), seed=1)

    def gradients(self, cotangent: Tensor) -> dict[str, Tensor]:
        """The gradients of ⟨value, cotangent⟩ by autograd."""
        leaves = {name: x.detach().clone().requires_grad_() for name, x in self.point.items()}
        return gradients_of(self(leaves), leaves, cotangent)

    def numbers(
        self,
        fn: Callable[..., Tensor] | None = None,
        data: Mapping[str, Tensor] | None = None,
        *,
        cotangent: Tensor | None = None,
        dynamic: bool = False,
    ) -> dict[str, Tensor]:
        """By what they are: the value, and the gradients of its sum, or of ⟨value, cotangent⟩.

        ``fn`` and ``data`` are called in place of the call's own; ``dynamic``: for a compiler their first dimension is.
        """
        given = self.data if data is None else data
        leaves = {name: given[name].detach().clone().requires_grad_() for name in self.inputs}
        given = {**given, **leaves}
        for x in given.values() if dynamic else ():
            torch._dynamo.mark_dynamic(x, 0)
        value = (fn or self.fn)(**given, **self.hyperparameters)
        found = gradients_of(value, leaves, cotangent)
        return {"the value": value.detach(), **{f"the gradient of {name}": x for name, x in found.items()}}


def gradients_of(
    value: Tensor, leaves: Mapping[str, Tensor], cotangent: Tensor | None = None, *, create_graph: bool = False
) -> dict[str, Tensor]:
    """The gradients of ⟨value, cotangent⟩, or of the sum, by name; 0 for a leaf that the value does not depend on."""
    if not value.requires_grad:
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    by = torch.ones_like(value) if cotangent is None else cotangent
    found = torch.autograd.grad(value, list(leaves.values()), by, create_graph=create_graph, allow_unused=True)
    return {name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(leaves.items(), found, strict=True)}


def random_like(x: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = x.dtype if x.is_floating_point() else torch.float64
    return torch.randn(x.shape, generator=generator, dtype=dtype)


@contextmanager
def errors_break_the_law(what: str) -> Iterator[None]:
    """An error that is raised inside becomes an AssertionError: ``what``, and the first lines of the error."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{what} {reason(error)}") from error


def reason(error: Exception) -> str:
    """The first lines of torch's error message, which name the operation."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"
