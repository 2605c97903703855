"""The errors, the columns of a batch, and row numbers.

A column has one entry per row along its first dimension. It is a dense tensor, a jagged tensor or a numpy array.
Contiguous rows of a tensor are views. Numpy columns are always copied, because an object array is only pointers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# From this number of tokens per row on, one view per row (a microsecond each) is cheaper than one index per token.
_LONG = 128


class BatchError(ValueError, AssertionError):
    """Wrong data or a wrong call. The message has the name, the value, what was expected, and the fix.

    It is also an ``AssertionError``, because trainers that use verl's container catch that.
    """

    __module__ = "rlprims.data_proto"  # the name that a traceback shows and that users import


class MissingField(BatchError, KeyError):
    """No field has this name. The message lists the fields that exist."""

    __module__ = "rlprims.data_proto"
    # KeyError would print the message in quotes, with its line breaks escaped.
    __str__ = Exception.__str__


class RowIndexError(BatchError, IndexError):
    """No row has this index. An ``IndexError``, so that a ``for`` loop over rows ends."""

    __module__ = "rlprims.data_proto"


def names(keys: Iterable[Any]) -> str:
    return "[" + ", ".join(str(key) for key in keys) + "]"


def listing(tensors: Mapping[str, Any] | None, arrays: Mapping[str, Any], meta: Mapping[Any, Any]) -> str:
    """The existing fields by part, for the end of a message."""
    in_batch = names(tensors.keys() if tensors is not None else ())
    return f"fields: batch {in_batch}, non_tensor_batch {names(arrays)}, meta_info {names(meta)}"


class Jagged(NamedTuple):
    """The components of a jagged tensor. ``dim`` is its ragged dimension, which is ``dim - 1`` of values.

    Depending on the version of torch, nested tensors have no indexing of their own, or it unbinds every row.
    """

    values: Tensor
    offsets: Tensor
    lengths: Tensor | None
    dim: int

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Self:
        dim = next(i for i, size in enumerate(tensor.shape) if isinstance(size, torch.SymInt))
        nested: Any = tensor  # torch declares these methods for sparse tensors only
        return cls(nested.values(), nested.offsets(), nested.lengths(), dim)

    @classmethod
    def packed(cls, tensor: Tensor) -> Self:
        """The components, with no unused values before, between or after the rows."""
        parts = cls.from_tensor(tensor)
        whole = int(parts.offsets[0]) == 0 and int(parts.offsets[-1]) == parts.values.shape[parts.dim - 1]
        if parts.lengths is None and whole:
            return parts
        return cls.from_tensor(take(tensor, torch.arange(len(parts.offsets) - 1, device=parts.offsets.device)))

    def nested(self) -> Tensor:
        build = torch.nested.nested_tensor_from_jagged
        tensor: Tensor = build(self.values, self.offsets, self.lengths, jagged_dim=self.dim)
        return tensor

    def row_lengths(self) -> Tensor:
        return self.offsets.diff() if self.lengths is None else self.lengths


def row(tensor: Tensor, index: int) -> Tensor:
    if not tensor.is_nested:
        return tensor[index]
    parts = Jagged.from_tensor(tensor)
    return parts.values.narrow(parts.dim - 1, int(parts.offsets[index]), int(parts.row_lengths()[index]))


def narrow(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Rows start to stop, as a view."""
    if not tensor.is_nested:
        return tensor[start:stop]
    values, offsets, lengths, dim = Jagged.from_tensor(tensor)
    first, last = int(offsets[start]), int(offsets[stop])
    lengths = None if lengths is None else lengths[start:stop]
    return Jagged(values.narrow(dim - 1, first, last - first), offsets[start : stop + 1] - first, lengths, dim).nested()


def take(tensor: Tensor, rows: Tensor) -> Tensor:
    """The rows in this order, copied once; jagged rows without holes. ``rows`` is int64 and not negative."""
    if not tensor.is_nested:
        return tensor.index_select(0, rows.to(tensor.device))
    parts = Jagged.from_tensor(tensor)
    rows = rows.to(parts.offsets.device)
    lengths, starts = parts.row_lengths()[rows], parts.offsets[rows]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    if int(offsets[-1]) <= _LONG * rows.numel():
        # Position p of new row r comes from the old row's start plus p's distance to the new row's start.
        shift = (starts - offsets[:-1]).repeat_interleave(lengths)
        positions = torch.arange(shift.numel(), device=shift.device) + shift
        values = parts.values.index_select(parts.dim - 1, positions)
    else:
        pieces = zip(starts.tolist(), lengths.tolist(), strict=True)
        values = torch.cat([parts.values.narrow(parts.dim - 1, start, size) for start, size in pieces], parts.dim - 1)
    return Jagged(values, offsets, None, parts.dim).nested()


def join(name: str, columns: Sequence[Any]) -> Any:
    """The columns (all tensors, or all arrays) concatenated along the rows, copied once."""
    first = columns[0]
    kinds = sorted({_kind_text(column) for column in columns})
    if len(kinds) > 1:
        what, how = ("kinds", "") if isinstance(first, Tensor) else ("dtypes", " with astype")
        raise BatchError(f"concat: {name} has different {what}: {kinds}; convert them to one{how} first")
    shapes = sorted({shape_text(column.shape[1:]) for column in columns})
    if len(shapes) > 1:
        raise BatchError(
            f"concat: rows of {name} have different shapes: {names(shapes)}; "
            "pad them to one shape, or make the column a jagged nested tensor"
        )
    if isinstance(first, np.ndarray):
        return np.concatenate(columns)
    if not first.is_nested:
        return torch.cat(list(columns))
    parts = [Jagged.packed(column) for column in columns]
    lengths = torch.cat([part.offsets.diff() for part in parts])
    offsets, dim = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), parts[0].dim
    return Jagged(torch.cat([part.values for part in parts], dim - 1), offsets, None, dim).nested()


def _kind_text(column: Tensor | Array) -> str:
    """What columns must share to be joined. Strings of different widths can be joined."""
    if isinstance(column, Tensor):
        return f"{dtype_text(column)} {column.layout} on {column.device}"
    return column.dtype.kind if column.dtype.kind in "US" else str(column.dtype)


def shape_text(shape: Sequence[Any]) -> str:
    sizes = ["*" if isinstance(size, torch.SymInt) else str(size) for size in shape]
    return "(" + ", ".join(sizes) + ("," if len(sizes) == 1 else "") + ")"


def dtype_text(column: Tensor | Array) -> str:
    return str(column.dtype).removeprefix("torch.")


def byte_count(column: Tensor | Array) -> int:
    """The bytes of the numbers; for an object column, those of its pointers and of the arrays and tensors in it."""
    if isinstance(column, Tensor):
        flat = column.values() if column.is_nested else column
        return flat.numel() * flat.element_size()
    in_cells = sum(getattr(cell, "nbytes", 0) for cell in column.flat) if column.dtype == object else 0
    return column.nbytes + in_cells


class Columns(NamedTuple):
    """All columns of a batch. ``rows`` is None if there is no column and no ``batch``, not even an empty one."""

    tensors: dict[str, Tensor]
    arrays: dict[str, Array]
    rows: int | None

    def map(self, of_tensor: Callable[[Tensor], Tensor], of_array: Callable[[Array], Array], rows: int) -> Self:
        """Every column changed, with this new number of rows."""
        return self._replace(
            tensors={name: of_tensor(tensor) for name, tensor in self.tensors.items()},
            arrays={name: of_array(array) for name, array in self.arrays.items()},
            rows=None if self.rows is None else rows,
        )

    def narrow(self, start: int, stop: int) -> Self:
        """Rows start to stop: views of the tensors."""
        return self.map(lambda x: narrow(x, start, stop), lambda x: x[start:stop].copy(), stop - start)

    def take(self, numbers: Tensor) -> Self:
        """The rows with these numbers (int64, on the CPU, from 0), in new memory."""
        return self.map(lambda x: take(x, numbers), lambda x: x[numbers.numpy()], numbers.numel())

    def by_name(self) -> dict[str, Tensor | Array]:
        return {**self.tensors, **self.arrays}


def joined(parts: Sequence[Columns]) -> Columns:
    """The columns of all parts, which have the same names, concatenated along the rows."""
    first, counts = parts[0], [part.rows for part in parts if part.rows is not None]
    return Columns(
        {name: join(name, [part.tensors[name] for part in parts]) for name in first.tensors},
        {name: join(name, [part.arrays[name] for part in parts]) for name in first.arrays},
        sum(counts) if counts else None,
    )


def object_array(cells: Sequence[Any]) -> Array:
    """An object array with one cell per row, for cells of any type.

    ``np.array(cells, dtype=object)`` would make more dimensions from lists or images of equal size.
    """
    return np.fromiter(cells, dtype=object, count=len(cells))


def is_column(value: Any) -> bool:
    """Whether a value has rows: a tensor or array with a dimension, or a list or tuple."""
    return isinstance(value, list | tuple) or (isinstance(value, Tensor | np.ndarray) and value.ndim > 0)


def as_array(name: str, value: Any) -> Array:
    """A value of ``non_tensor_batch`` as it is stored: an array unchanged, a list as one object per row."""
    if not is_column(value) or isinstance(value, Tensor):
        raise BatchError(
            f"non_tensor_batch[{name!r}] is {type(value).__name__}, expected a numpy array or a list with one entry "
            "per row; tensors belong in batch, values of the whole batch in meta_info"
        )
    return value if isinstance(value, np.ndarray) else object_array(value)


def check_tensor(name: str, tensor: Any) -> None:
    """Raise a BatchError unless the value is a tensor with rows, dense or jagged."""
    if not isinstance(tensor, Tensor):
        raise BatchError(
            f"batch[{name!r}] is {type(tensor).__name__}, expected a tensor; numpy arrays and lists belong in "
            "non_tensor_batch, other objects in meta_info; flatten a nested TensorDict with flatten_keys('.')"
        )
    if tensor.ndim == 0:
        raise BatchError(f"batch[{name!r}] has no rows: it is a scalar; keep it in meta_info")
    if tensor.is_nested and tensor.layout != torch.jagged:
        raise BatchError(
            f"batch[{name!r}] is a nested tensor of layout {tensor.layout}, expected torch.jagged; build it with "
            "torch.nested.nested_tensor(..., layout=torch.jagged)"
        )


def checked(tensors: dict[str, Tensor], arrays: dict[str, Array], batch: TensorDict | None) -> Columns:
    """The columns, if all of them (and ``batch``) have the same number of rows. Else raise a BatchError."""
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    if not tensors.keys().isdisjoint(arrays):
        twice = sorted(tensors.keys() & arrays.keys())
        raise BatchError(f"batch and non_tensor_batch both have {names(twice)}; rename or drop one of each")
    counts = {name: column.shape[0] for part in (tensors, arrays) for name, column in part.items()}
    if batch is not None:
        counts["batch_size"] = batch.batch_size[0]
    if len(set(counts.values())) > 1:
        raise BatchError(f"fields have different numbers of rows: {counts}; give every field one entry per row")
    return Columns(tensors, arrays, next(iter(counts.values()), None))


def batch_of(tensors: Mapping[str, Tensor], rows: int, device: Any = None) -> TensorDict:
    return TensorDict(dict(tensors), batch_size=torch.Size([rows]), device=device)


def row_range(count: int) -> Tensor:
    """The row numbers below ``count``. They are on the CPU for any default device of torch, like object columns."""
    return torch.arange(count, device="cpu")


def row_numbers(index: Any, rows: int, what: str, fields: str) -> Tensor:
    """Row numbers from a list, range, array or tensor of integers, or from a mask.

    ``what`` is the name of the method and ``fields`` lists the fields of the batch, for messages.
    """
    if isinstance(index, Tensor):
        given = index.detach().cpu()
    elif isinstance(index, list | range | np.ndarray):
        array = np.asarray(index)
        if array.dtype.kind not in "biuf":
            raise BatchError(f"{what}: cannot index rows with {array.dtype}: {index!r}; use integers or a mask")
        given = torch.from_numpy(np.array(array, dtype=bool if array.dtype.kind == "b" else None))
    else:
        raise BatchError(
            f"{what}: cannot index rows with {type(index).__name__}; use an int, a slice, or a list, array or tensor "
            "of integers or of booleans (one per row)"
        )
    if given.ndim != 1:
        raise BatchError(f"{what}: the index has shape {tuple(given.shape)}, expected one dimension")
    if given.dtype == torch.bool:
        if given.numel() != rows:
            raise BatchError(f"{what}: the mask has {given.numel()} entries, the batch {rows} rows; {fields}")
        return given.nonzero().squeeze(1)
    if not given.numel():
        return given.long()
    if given.is_floating_point() or given.is_complex():
        raise BatchError(f"{what}: cannot index rows with {given.dtype}; use integers or a mask")
    given = given.long()
    lowest, highest = (int(end) for end in given.aminmax())
    if lowest < -rows or highest >= rows:
        wrong = highest if highest >= rows else lowest
        raise RowIndexError(f"{what}: row {wrong} of a batch of {rows} rows; {fields}")
    return torch.where(given < 0, given + rows, given) if lowest < 0 else given
