"""A subclass of this library's DataProto with the further methods of verl's, for code that was written for verl.

Write ``from rlprims.interop.verl import DataProto`` in place of ``from verl import DataProto``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from einops import rearrange
from torch import Tensor

from rlprims import data_proto
from rlprims.data_proto import BatchError
from rlprims.data_proto._columns import Array, Columns, byte_count, names, row_range
from rlprims.data_proto._convert import bytes_text
from rlprims.data_proto._rows import extended, gathered


class DataProto(data_proto.DataProto):
    """:class:`rlprims.DataProto` with the further methods of verl's.

    >>> data = DataProto.from_dict({"ids": torch.arange(4)})
    >>> data.fold_batch_dim(2)["ids"].tolist()
    [[0, 1], [2, 3]]
    """

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[Any, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """As in the base class. ``num_batch_dims`` must be 1 and ``auto_padding`` False.

        Raises:
            BatchError: as in the base class, or another value of the last two arguments.
        """
        if num_batch_dims != 1:
            raise BatchError(f"num_batch_dims is {num_batch_dims}, expected 1; for rows of rows use fold_batch_dim")
        if auto_padding:
            raise BatchError("auto_padding is True, expected False: it hides the added rows; use pad_to_divisor, unpad")
        return super().from_dict(tensors, non_tensors, meta_info)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[Any, Any] | None = None, auto_padding: bool = False
    ) -> Self:
        """As in the base class. ``auto_padding`` must be False, as in :meth:`from_dict`."""
        if auto_padding:
            return cls.from_dict(auto_padding=True)
        return super().from_single_dict(data, meta_info)

    def sample_level_repeat(self, repeat_times: Sequence[int] | Array | Tensor) -> Self:
        """Repeat row i ``repeat_times[i]`` times; 0 drops the row.

        Raises:
            BatchError: not one number per row, or a negative one.

        >>> DataProto.from_dict({"ids": torch.arange(3)}).sample_level_repeat([2, 0, 1])["ids"].tolist()
        [0, 0, 2]
        """
        try:
            times = torch.as_tensor(repeat_times, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            times = torch.empty(())  # not numbers: the shape is wrong
        if times.shape != (len(self),) or (times.numel() and (times.is_floating_point() or int(times.min()) < 0)):
            given = f"{repeat_times!r} for {len(self)} rows"
            raise BatchError(f"sample_level_repeat: got {given}, expected one integer per row, at least 0")
        return gathered(self, row_range(len(self)).repeat_interleave(times.long()))

    def padding(self, padding_size: int, padding_candidate: str = "last") -> Self:
        """The batch with ``padding_size`` more rows at the end, copies of its "first" or its "last" row.

        Raises:
            BatchError: a negative size, another candidate, or no row to copy.

        >>> DataProto.from_dict({"ids": torch.arange(2)}).padding(2, "first")["ids"].tolist()
        [0, 1, 0, 0]
        """
        rows = len(self)
        if padding_size < 0 or padding_candidate not in ("first", "last"):
            given = f"size {padding_size} and candidate {padding_candidate!r}"
            raise BatchError(f"padding: got {given}, expected a size of at least 0 and 'first' or 'last'")
        if padding_size and not rows:
            raise BatchError(f"padding: the batch has no rows, so there is none to copy; {self._fields()}")
        row = 0 if padding_candidate == "first" else rows - 1
        return extended(self, torch.full((padding_size,), row, device="cpu"))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Mini-batches of several passes over the batch. With ``{"shuffle": True}`` each pass has another order.

        Args:
            mini_batch_size: rows per mini-batch; must divide the number of rows.
            epochs: the number of passes over all rows.
            seed: the seed of the random order; None means 0, so that the order never depends on what ran before.
            dataloader_kwargs: only ``shuffle`` is supported, because no data loader is used.

        Raises:
            BatchError: at the call, a size that does not divide the rows, a negative number, or an unknown option.

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
                f"make_iterator: got mini_batch_size {mini_batch_size} and epochs {epochs} for {len(self)} rows, "
                "expected a size that divides the rows and epochs >= 0; use pad_to_divisor or select rows first"
            )
        generator = torch.Generator("cpu").manual_seed(seed or 0)

        def mini_batches() -> Iterator[Self]:
            for _ in range(epochs if len(self) else 0):
                if in_random_order:
                    order = torch.randperm(len(self), generator=generator, device="cpu")
                    yield from (gathered(self, rows) for rows in torch.split(order, mini_batch_size))
                else:
                    yield from self.split(mini_batch_size)

        return mini_batches()

    def fold_batch_dim(self, new_batch_size: int) -> Self:
        """Fewer, longer rows: a column (B, ...) becomes (new_batch_size, B / new_batch_size, ...).

        The G consecutive samples of a prompt become one row, for example. The tensors are views if their memory allows.

        Raises:
            BatchError: the size does not divide the rows, or a field is jagged, so that its rows have no common shape.

        >>> data = DataProto.from_dict({"ids": torch.arange(4)}, {"uid": ["a", "a", "b", "b"]})
        >>> folded = data.fold_batch_dim(2)
        >>> folded["ids"].tolist(), folded["uid"].tolist()
        ([[0, 1], [2, 3]], [['a', 'a'], ['b', 'b']])
        >>> folded.unfold_batch_dim()["uid"].tolist()
        ['a', 'a', 'b', 'b']
        """
        columns, rows = self._columns(), len(self)
        if new_batch_size < 1 or rows % new_batch_size:
            fix = f"use pad_to_divisor({new_batch_size}) first"
            raise BatchError(f"fold_batch_dim: {rows} rows cannot be folded into {new_batch_size} equal rows; {fix}")
        _check_dense(columns.tensors)
        return self._like(_rearranged(columns, "(b g) ... -> b g ...", new_batch_size, b=new_batch_size))

    def unfold_batch_dim(self, batch_dims: int = 2) -> Self:
        """Merge the first ``batch_dims`` dimensions of every column into rows: the inverse of `fold_batch_dim`.

        Raises:
            BatchError: the columns do not have the same first dimensions.

        >>> DataProto.from_dict({"ids": torch.zeros(2, 3, 4)}).unfold_batch_dim()["ids"].shape
        torch.Size([6, 4])
        """
        columns = self._columns()
        _check_dense(columns.tensors)
        leading = {name: tuple(column.shape[:batch_dims]) for name, column in columns.by_name().items()}
        sizes = next(iter(leading.values()), (len(self),))
        if batch_dims < 1 or {*leading.values()} - {sizes} or (leading and len(sizes) < batch_dims):
            wanted = f"columns with the same first {batch_dims} dimensions"
            raise BatchError(f"unfold_batch_dim: expected {wanted}, got {leading}; {self._fields()}")
        axes = " ".join(f"b{number}" for number in range(batch_dims))
        return self._like(_rearranged(columns, f"{axes} ... -> ({axes}) ...", math.prod(sizes)))

    def print_size(self, prefix: str = "") -> str:
        """The sizes of the parts, as a text to print or to log.

        >>> DataProto.from_dict({"ids": torch.arange(3)}, {"uid": ["a", "b", "c"]}).print_size("rollout")
        'rollout: batch 24 B, non_tensor_batch 24 B'
        """
        tensors = sum(byte_count(tensor) for tensor in self.batch.values()) if self.batch is not None else 0
        arrays = sum(byte_count(array) for array in self.non_tensor_batch.values())
        return f"{prefix}: batch {bytes_text(tensors)}, non_tensor_batch {bytes_text(arrays)}".removeprefix(": ")

    get_data_info = data_proto.DataProto.__repr__
    save_to_disk = data_proto.DataProto.save

    @classmethod
    def load_from_disk(cls, path: str | os.PathLike[str]) -> Self:
        """``load``."""
        return cls.load(path)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """``data.fold_batch_dim(new_batch_size)``, under verl's name."""
    return data.fold_batch_dim(new_batch_size)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """``data.unfold_batch_dim(batch_dims)``, under verl's name."""
    return data.unfold_batch_dim(batch_dims)


def _rearranged(columns: Columns, pattern: str, rows: int, **sizes: int) -> Columns:
    """All columns by a pattern of einops, as that many rows; arrays are copied."""
    return columns.map(lambda x: rearrange(x, pattern, **sizes), lambda x: rearrange(x, pattern, **sizes).copy(), rows)


def _check_dense(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_nested:
            raise BatchError(f"{name} is jagged, expected rows of one shape; use to_padded_tensor on it first")
