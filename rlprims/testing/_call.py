"""A call of a function under test, for the transforms of torch: tensors by name, the batch as first dimension."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlprims.testing._cases import LARGE, TOY

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

    def gradients(self, cotangent: Tensor, data: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The gradients of ⟨value, cotangent⟩ by autograd; 0 if the value does not depend on an input."""
        leaves = {name: (data or self.data)[name].detach().clone().requires_grad_() for name in self.inputs}
        value = self({**(data or {}), **leaves})
        if not value.requires_grad:
            return {name: torch.zeros_like(x) for name, x in leaves.items()}
        return or_zeros(leaves, torch.autograd.grad(value, list(leaves.values()), cotangent, allow_unused=True))


class Subject(Protocol):
    """The interface of a function under test that the laws of transforms use."""

    @property
    def layouts(self) -> tuple[str, ...]:
        """``padded``, and ``packed`` if the function takes ``cu_seqlens``."""
        ...

    def sample(self, rows: int, width: int, *, seed: int = 0, layout: str = "padded", full: bool = True) -> Call:
        """A call on a random batch, with all optional data or with none. Samples of one size have the same shapes."""
        ...


def samples(subject: Subject) -> Iterator[Call]:
    """The toy and the large batch in each layout; the padded toy with and without optional data."""
    least, toy = subject.sample(*TOY, full=False), subject.sample(*TOY)
    if least.data.keys() != toy.data.keys():
        yield least
    for layout in subject.layouts:
        yield subject.sample(*TOY, layout=layout)
        yield subject.sample(*LARGE, layout=layout)


def few_samples(subject: Subject) -> Iterator[Call]:
    """Each size and each layout once: the large batch padded, the toy packed."""
    yield subject.sample(*LARGE)
    yield subject.sample(*TOY, layout=subject.layouts[-1])


def or_zeros(leaves: Mapping[str, Tensor], found: Iterable[Tensor | None]) -> dict[str, Tensor]:
    """The gradients by name; 0 for a leaf that the value does not depend on."""
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
