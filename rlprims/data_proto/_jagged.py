"""Rows of a jagged nested tensor, from its values and offsets.

Depending on the version of torch, nested tensors have no indexing of their own, or it unbinds every row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# From this number of tokens per row on, one view per row (a microsecond each) is cheaper than one index per token.
_LONG = 128


class Parts(NamedTuple):
    """The components of a jagged tensor. ``dim`` is its ragged dimension, which is ``dim - 1`` of values."""

    values: Tensor
    offsets: Tensor
    lengths: Tensor | None
    dim: int


def components(nested: Tensor) -> Parts:
    dim = next(i for i, size in enumerate(nested.shape) if isinstance(size, torch.SymInt))
    jagged: Any = nested  # torch declares these methods for sparse tensors only
    return Parts(jagged.values(), jagged.offsets(), jagged.lengths(), dim)


def from_components(parts: Parts) -> Tensor:
    build = torch.nested.nested_tensor_from_jagged
    nested: Tensor = build(parts.values, parts.offsets, parts.lengths, jagged_dim=parts.dim)
    return nested


def lengths(parts: Parts) -> Tensor:
    return parts.offsets.diff() if parts.lengths is None else parts.lengths


def row(nested: Tensor, index: int) -> Tensor:
    parts = components(nested)
    return parts.values.narrow(parts.dim - 1, int(parts.offsets[index]), int(lengths(parts)[index]))


def narrow(nested: Tensor, start: int, stop: int) -> Tensor:
    """Rows start to stop; the values are a view."""
    values, offsets, lens, dim = components(nested)
    first, last = int(offsets[start]), int(offsets[stop])
    own = values.narrow(dim - 1, first, last - first)
    return from_components(
        Parts(own, offsets[start : stop + 1] - first, None if lens is None else lens[start:stop], dim)
    )


def take(nested: Tensor, rows: Tensor) -> Tensor:
    """The rows in this order, packed, without holes."""
    parts = components(nested)
    rows = rows.to(parts.offsets.device)
    lens, starts = lengths(parts)[rows], parts.offsets[rows]
    offsets = torch.cat([lens.new_zeros(1), lens.cumsum(0)])
    if int(offsets[-1]) <= _LONG * rows.numel():
        # Position p of new row r comes from the old row's start plus p's distance to the new row's start.
        shift = (starts - offsets[:-1]).repeat_interleave(lens)
        positions = torch.arange(shift.numel(), device=shift.device) + shift
        values = parts.values.index_select(parts.dim - 1, positions)
    else:
        pieces = zip(starts.tolist(), lens.tolist(), strict=True)
        values = torch.cat([parts.values.narrow(parts.dim - 1, start, size) for start, size in pieces], parts.dim - 1)
    return from_components(Parts(values, offsets, None, parts.dim))


def packed(nested: Tensor) -> Parts:
    """The components, with no unused values before, between or after the rows."""
    parts = components(nested)
    whole = int(parts.offsets[0]) == 0 and int(parts.offsets[-1]) == parts.values.shape[parts.dim - 1]
    if parts.lengths is None and whole:
        return parts
    rows = torch.arange(parts.offsets.numel() - 1, device=parts.offsets.device)
    return components(take(nested, rows))


def offsets_of_joined(parts: Sequence[Parts]) -> Tensor:
    joined = torch.cat([part.offsets.diff() for part in parts])
    return torch.cat([joined.new_zeros(1), joined.cumsum(0)])
