"""Rows of a jagged nested tensor, from its values and offsets.

The nested tensor's own indexing either does not exist or unbinds every row, depending on the version of torch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Tokens per row from which one view per row (a microsecond each) costs less than one index per token.
_LONG = 128


class Parts(NamedTuple):
    """A jagged tensor taken apart. ``dim`` is the ragged dimension of the nested tensor, so ``dim - 1`` of values."""

    values: Tensor
    offsets: Tensor
    lengths: Tensor | None
    dim: int


def apart(nested: Tensor) -> Parts:
    dim = next(i for i, size in enumerate(nested.shape) if isinstance(size, torch.SymInt))
    jagged: Any = nested  # torch declares these methods for sparse tensors only
    return Parts(jagged.values(), jagged.offsets(), jagged.lengths(), dim)


def together(parts: Parts) -> Tensor:
    build = torch.nested.nested_tensor_from_jagged
    nested: Tensor = build(parts.values, parts.offsets, parts.lengths, jagged_dim=parts.dim)
    return nested


def lengths(parts: Parts) -> Tensor:
    return parts.offsets.diff() if parts.lengths is None else parts.lengths


def row(nested: Tensor, index: int) -> Tensor:
    parts = apart(nested)
    return parts.values.narrow(parts.dim - 1, int(parts.offsets[index]), int(lengths(parts)[index]))


def narrow(nested: Tensor, start: int, stop: int) -> Tensor:
    """Rows start to stop; the values are a view."""
    values, offsets, lens, dim = apart(nested)
    first, last = int(offsets[start]), int(offsets[stop])
    own = values.narrow(dim - 1, first, last - first)
    return together(Parts(own, offsets[start : stop + 1] - first, None if lens is None else lens[start:stop], dim))


def take(nested: Tensor, rows: Tensor) -> Tensor:
    """The rows in this order, packed: no holes remain."""
    parts = apart(nested)
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
    return together(Parts(values, offsets, None, parts.dim))


def packed(nested: Tensor) -> Parts:
    """Apart, with no unused values before, between or after the rows."""
    parts = apart(nested)
    whole = int(parts.offsets[0]) == 0 and int(parts.offsets[-1]) == parts.values.shape[parts.dim - 1]
    if parts.lengths is None and whole:
        return parts
    rows = torch.arange(parts.offsets.numel() - 1, device=parts.offsets.device)
    return apart(take(nested, rows))


def offsets_of_joined(parts: Sequence[Parts]) -> Tensor:
    joined = torch.cat([part.offsets.diff() for part in parts])
    return torch.cat([joined.new_zeros(1), joined.cumsum(0)])
