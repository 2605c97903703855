"""What verl's DataProto has beyond ours, for code that was written for it.

``from rlprims.interop.verl import DataProto`` stands for ``from verl import DataProto``: a subclass of this library's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from rlprims import data_proto
from rlprims.data_proto import BatchError, MissingField
from rlprims.data_proto._columns import Array, Columns, byte_count, object_array, take
from rlprims.data_proto._errors import names
from rlprims.data_proto._rows import row_range
from rlprims.data_proto._text import bytes_text

D = TypeVar("D", bound=data_proto.DataProto)


class DataProto(data_proto.DataProto):
    """:class:`rlprims.DataProto` with the methods of verl's that ours leaves out.

    >>> data = DataProto.from_dict({"ids": torch.arange(4)})
    >>> data.fold_batch_dim(2)["ids"].tolist()
    [[0, 1], [2, 3]]
    """

    def sample_level_repeat(self, repeat_times: Sequence[int] | Array | Tensor) -> Self:
        """Every row its own number of times, 0 included.

        Raises:
            BatchError: not one number per row, or a negative one.

        >>> from rlprims.interop.verl import DataProto
        >>> DataProto.from_dict({"ids": torch.arange(3)}).sample_level_repeat([2, 0, 1])["ids"].tolist()
        [0, 0, 2]
        """
        try:
            times = torch.as_tensor(repeat_times, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            times = torch.empty(())  # no numbers at all: refused below
        if times.shape != (len(self),) or (times.numel() and (times.is_floating_point() or int(times.min()) < 0)):
            raise BatchError(
                f"sample_level_repeat: got {repeat_times!r} for {len(self)} rows; give one integer per row, at least 0"
            )
        return self._gather(row_range(len(self)).repeat_interleave(times.long()))

    def padding(self, padding_size: int, padding_candidate: str = "last") -> Self:
        """The batch with ``padding_size`` more rows at the end, copies of its "first" or its "last" row.

        Raises:
            BatchError: a negative size, another candidate, or no row to copy.

        >>> from rlprims.interop.verl import DataProto
        >>> DataProto.from_dict({"ids": torch.arange(2)}).padding(2, "first")["ids"].tolist()
        [0, 1, 0, 0]
        """
        rows = len(self)
        if padding_size < 0 or padding_candidate not in ("first", "last"):
            raise BatchError(
                f"padding: got size {padding_size} and candidate {padding_candidate!r}; give a size of at "
                "least 0, and 'first' or 'last'"
            )
        if padding_size and not rows:
            raise BatchError(f"padding: a batch without rows has none to copy {padding_size} times; {self._fields()}")
        row = 0 if padding_candidate == "first" else rows - 1
        return self._extended(torch.full((padding_size,), row, device="cpu"))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Mini-batches of several passes over the batch. With ``{"shuffle": True}`` each pass has an order of its own.

        Args:
            mini_batch_size: rows per mini-batch; must divide the rows.
            epochs: passes over all rows.
            seed: of the random order; None counts as 0, so that the order never depends on what ran before.
            dataloader_kwargs: only ``shuffle`` has a meaning here, since there is no loader.

        Raises:
            BatchError: at the call, sizes that do not divide, a number below its least, or an unknown option.

        >>> from rlprims.interop.verl import DataProto
        >>> data = DataProto.from_dict({"ids": torch.arange(4)})
        >>> [part["ids"].tolist() for part in data.make_iterator(2, epochs=1)]
        [[0, 1], [2, 3]]
        """
        options = dict(dataloader_kwargs or {})
        in_random_order = bool(options.pop("shuffle", False))
        if options:
            raise BatchError(f"make_iterator: unknown dataloader_kwargs {names(options)}; only shuffle is supported")
        if mini_batch_size < 1 or len(self) % mini_batch_size or epochs < 0:
            raise BatchError(
                f"make_iterator: {len(self)} rows, mini_batch_size {mini_batch_size}, epochs {epochs}; the size must "
                "divide the rows (pad_to_divisor, or select rows first) and epochs be at least 0"
            )
        generator = torch.Generator("cpu").manual_seed(seed or 0)

        def mini_batches() -> Iterator[Self]:
            for _ in range(epochs):
                if in_random_order:
                    order = torch.randperm(len(self), generator=generator, device="cpu")
                    yield from (
                        self._gather(numbers) for numbers in torch.split(order, mini_batch_size) if numbers.numel()
                    )
                else:
                    yield from self.split(mini_batch_size)

        return mini_batches()

    def fold_batch_dim(self, new_batch_size: int) -> Self:
        """Fewer, longer rows: a column (B, ...) becomes (new_batch_size, B / new_batch_size, ...).

        So the G samples of a prompt, one after another, become one row that is moved as one. Views where memory allows.

        Raises:
            BatchError: the rows do not divide, or a jagged field, whose rows have no common shape.

        >>> from rlprims.interop.verl import DataProto
        >>> data = DataProto.from_dict({"ids": torch.arange(4)}, {"uid": ["a", "a", "b", "b"]})
        >>> folded = data.fold_batch_dim(2)
        >>> folded["ids"].tolist(), folded["uid"].tolist()
        ([[0, 1], [2, 3]], [['a', 'a'], ['b', 'b']])
        >>> folded.unfold_batch_dim()["uid"].tolist()
        ['a', 'a', 'b', 'b']
        """
        tensors, arrays, rows = self._columns()
        if new_batch_size < 1 or (rows or 0) % new_batch_size:
            raise BatchError(
                f"fold_batch_dim: {rows} rows do not make {new_batch_size} equal rows; use "
                f"pad_to_divisor({new_batch_size}) first"
            )
        inner = (rows or 0) // new_batch_size
        return self._like(
            Columns(
                {
                    n: _dense(n, t, "fold_batch_dim").reshape(new_batch_size, inner, *t.shape[1:])
                    for n, t in tensors.items()
                },
                {name: array.reshape(new_batch_size, inner, *array.shape[1:]).copy() for name, array in arrays.items()},
                None if rows is None else new_batch_size,
            )
        )

    def unfold_batch_dim(self, batch_dims: int = 2) -> Self:
        """Rows made of the first ``batch_dims`` dimensions of every column: the inverse of `fold_batch_dim`.

        Raises:
            BatchError: columns that do not share those dimensions.

        >>> from rlprims.interop.verl import DataProto
        >>> DataProto.from_dict({"ids": torch.zeros(2, 3, 4)}).unfold_batch_dim()["ids"].shape
        torch.Size([6, 4])
        """
        tensors, arrays, rows = self._columns()
        for name, tensor in tensors.items():
            _dense(name, tensor, "unfold_batch_dim")
        leading = {name: tuple(c.shape[:batch_dims]) for part in (tensors, arrays) for name, c in part.items()}
        if (
            batch_dims < 1
            or len(set(leading.values())) > 1
            or any(len(sizes) < batch_dims for sizes in leading.values())
        ):
            raise BatchError(
                f"unfold_batch_dim: columns need the same first {batch_dims} dimensions, got {leading}; "
                f"{self._fields()}"
            )
        sizes = next(iter(leading.values()), (rows or 0,))
        merged_rows = torch.Size(sizes).numel()
        return self._like(
            Columns(
                {name: tensor.reshape(merged_rows, *tensor.shape[batch_dims:]) for name, tensor in tensors.items()},
                {name: array.reshape(merged_rows, *array.shape[batch_dims:]).copy() for name, array in arrays.items()},
                None if rows is None else merged_rows,
            )
        )

    def unfold_column_chunks(self, n_split: int, split_keys: Iterable[str] | None = None) -> Self:
        """Rows cut into ``n_split`` rows: fields in ``split_keys`` along their second dimension, the others repeated.

        An object column in ``split_keys`` is cut along its second dimension if it has one, else cell by cell.

        Raises:
            MissingField: a split key that is no column.
            BatchError: a second dimension that does not divide, or a jagged field to split.

        >>> from rlprims.interop.verl import DataProto
        >>> data = DataProto.from_dict({"pair": torch.tensor([[1, 2], [3, 4]])}, {"uid": ["a", "b"]})
        >>> cut = data.unfold_column_chunks(2, split_keys=["pair"])
        >>> cut["pair"].tolist(), cut["uid"].tolist()
        ([[1], [2], [3], [4]], ['a', 'a', 'b', 'b'])
        """
        tensors, arrays, rows = self._columns()
        keys = set(split_keys or ())
        for name in keys - tensors.keys() - arrays.keys():
            raise MissingField(f"no column {name!r}; {self._fields()}")
        if n_split < 1:
            raise BatchError(f"unfold_column_chunks: n_split is {n_split}, it needs to be at least 1")
        count = (rows or 0) * n_split
        numbers = row_range(rows or 0).repeat_interleave(n_split)

        def tensor_rows(name: str, tensor: Tensor) -> Tensor:
            if name not in keys:
                return take(tensor, numbers)
            width = _divided(name, _dense(name, tensor, "unfold_column_chunks").shape[1:], n_split)
            return tensor.reshape(count, width, *tensor.shape[2:])

        def array_rows(name: str, array: Array) -> Array:
            if name not in keys:
                return array.repeat(n_split, axis=0)
            if array.ndim > 1:
                return array.reshape(count, _divided(name, array.shape[1:], n_split), *array.shape[2:]).copy()
            return object_array([piece for cell in array for piece in _cell_parts(name, cell, n_split)])

        return self._like(
            Columns(
                {name: tensor_rows(name, tensor) for name, tensor in tensors.items()},
                {name: array_rows(name, array) for name, array in arrays.items()},
                None if rows is None else count,
            )
        )

    def print_size(self, prefix: str = "") -> str:
        """How large the parts are, as a text to print or to log.

        >>> from rlprims.interop.verl import DataProto
        >>> DataProto.from_dict({"ids": torch.arange(3)}, {"uid": ["a", "b", "c"]}).print_size("rollout")
        'rollout: batch 24 B, non_tensor_batch 24 B'
        """
        tensors = sum(byte_count(tensor) for tensor in self.batch.values()) if self.batch is not None else 0
        arrays = sum(byte_count(array) for array in self.non_tensor_batch.values())
        return f"{prefix}: batch {bytes_text(tensors)}, non_tensor_batch {bytes_text(arrays)}".removeprefix(": ")

    def get_data_info(self) -> str:
        """The table of the fields, as ``repr`` gives it."""
        return repr(self)

    def save_to_disk(self, path: str | os.PathLike[str]) -> None:
        """``save``."""
        self.save(path)

    @classmethod
    def load_from_disk(cls, path: str | os.PathLike[str]) -> Self:
        """``load``."""
        return cls.load(path)


def pad_dataproto_to_divisor(data: D, size_divisor: int) -> tuple[D, int]:
    """``data.pad_to_divisor(size_divisor)``, under verl's name."""
    return data.pad_to_divisor(size_divisor)


def unpad_dataproto(data: D, pad_size: int) -> D:
    """``data.unpad(pad_size)``, under verl's name."""
    return data.unpad(pad_size)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """``data.fold_batch_dim(new_batch_size)``, under verl's name."""
    return data.fold_batch_dim(new_batch_size)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """``data.unfold_batch_dim(batch_dims)``, under verl's name."""
    return data.unfold_batch_dim(batch_dims)


def _dense(name: str, tensor: Tensor, what: str) -> Tensor:
    if tensor.is_nested:
        raise BatchError(f"{what}: {name} is jagged, its rows have no common shape; use to_padded_tensor on it first")
    return tensor


def _divided(name: str, row_shape: tuple[int, ...], n_split: int) -> int:
    if not row_shape or row_shape[0] % n_split:
        raise BatchError(
            f"unfold_column_chunks: rows of {name} have shape {tuple(row_shape)}, their first dimension does not make "
            f"{n_split} equal parts; leave {name} out of split_keys to repeat it"
        )
    return row_shape[0] // n_split


def _cell_parts(name: str, cell: Any, n_split: int) -> list[Any]:
    width = _divided(name, (len(cell),) if hasattr(cell, "__len__") else (), n_split)
    return [cell[number * width : (number + 1) * width] for number in range(n_split)]
