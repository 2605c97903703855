"""The batch: rows of tensors, rows of objects, and what is true of all rows."""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
from tensordict import TensorDict
from torch import Tensor

from rlprims.data_proto import (
    _columns,
    _convert,
    _fields,
    _pickling,
    _pieces,
    _repeats,
    _rows,
    _shapes,
    _storage,
    _text,
)
from rlprims.data_proto._columns import Array
from rlprims.data_proto._errors import BatchError, MissingField, RowIndexError, listing
from rlprims.data_proto._meta import copied
from rlprims.data_proto._parts import as_array, batch_of, check_tensor, columns, common_rows, fields, missing, part_of

Index: TypeAlias = "builtins.slice[Any, Any, Any] | range | list[Any] | Array | Tensor"


@dataclass(frozen=True)
class DataProtoItem:
    """One row: its tensors (a TensorDict without a batch dimension), its objects, and a copy of ``meta_info``.

    >>> import torch
    >>> from rlprims.data_proto import DataProto
    >>> item = DataProto.from_dict({"ids": torch.arange(2)}, {"uid": ["a", "b"]}, {"step": 1})[1]
    >>> item["ids"], item["uid"], item["step"]
    (tensor(1), 'b', 1)
    """

    batch: Any
    non_tensor_batch: dict[str, Any]
    meta_info: dict[Any, Any]

    def __getitem__(self, name: str) -> Any:
        for part in (self.batch, self.non_tensor_batch, self.meta_info):
            if part is not None and name in part.keys():  # noqa: SIM118 - a TensorDict has no other `in`
                return part[name]
        raise MissingField(f"no field {name!r}; {listing(self.batch, self.non_tensor_batch, self.meta_info)}")


class DataProto:
    """A batch for post-training: ``batch`` (TensorDict or None), ``non_tensor_batch`` (numpy arrays), ``meta_info``.

    ``data["name"]`` reads a field of any of the three. Every method returns a new batch and leaves this one as it is;
    only item assignment and `pop` change it. What a result shares and what it does not:

    - tensors are taken as they are, never copied on entry; contiguous rows are views, other rows are copied once.
      An in-place write into a tensor of a result may therefore be seen in the batch that it came from;
    - numpy arrays of a result are its own; the objects in their cells are shared;
    - ``meta_info`` of a result is its own at every depth.

    A tensor may be a jagged nested tensor (``torch.nested``, ``layout=torch.jagged``). Zero rows are legal everywhere.

    Args:
        batch: a TensorDict with one batch dimension, or a dict of tensors with the same number of rows, or None.
        non_tensor_batch: per name, a numpy array with that number of rows, or a list with one object per row.
        meta_info: what belongs to the whole batch.

    Raises:
        BatchError: (a ValueError) a field without rows, or fields with different numbers of rows.

    >>> import torch
    >>> from rlprims.data_proto import DataProto
    >>> data = DataProto.from_dict({"ids": torch.arange(6).view(3, 2)}, {"uid": ["a", "a", "b"]}, {"step": 1})
    >>> len(data), data["uid"].tolist(), data["step"], "ids" in data
    (3, ['a', 'a', 'b'], 1, True)
    >>> data["advantages"] = torch.zeros(3, 2)
    >>> data
    DataProto: 3 rows, 96 B
      batch             ids         int64    (3, 2)  48 B
      batch             advantages  float32  (3, 2)  24 B
      non_tensor_batch  uid         object   (3,)    24 B
      meta_info         step        int      1
    >>> data[1:]["ids"].tolist()
    [[2, 3], [4, 5]]
    """

    batch: Any
    non_tensor_batch: dict[str, Array]
    meta_info: dict[Any, Any]

    def __init__(
        self,
        batch: TensorDict | Mapping[str, Tensor] | None = None,
        non_tensor_batch: Mapping[str, Array | list[Any]] | None = None,
        meta_info: Mapping[Any, Any] | None = None,
    ) -> None:
        sizes = getattr(batch, "batch_size", None)
        if sizes is not None and len(sizes) != 1:
            raise BatchError(
                f"batch has batch_size {tuple(sizes)}, it needs one batch dimension; see batch.flatten() and "
                "TensorDict.auto_batch_size_(batch_dims=1)"
            )
        tensors = {} if batch is None else dict(batch.items())
        for name, tensor in tensors.items():
            check_tensor(name, tensor)
        self.non_tensor_batch = {name: as_array(name, value) for name, value in (non_tensor_batch or {}).items()}
        self.meta_info = {key: copied(value) for key, value in (meta_info or {}).items()}
        rows = common_rows(tensors, self.non_tensor_batch, batch if sizes is not None else None)
        # A new TensorDict over the same tensors: assigning a field here must not add it to the caller's.
        keep = rows is not None and (tensors or sizes is not None)
        self.batch = batch_of(tensors, rows or 0, getattr(batch, "device", None)) if keep else None
        self.check_consistency()

    # To other containers, disk and processes; the way back is below.
    to_tensordict = _convert.to_tensordict
    to_pandas = _convert.to_pandas
    to_arrow = _convert.to_arrow
    save = save_to_disk = _storage.save
    __reduce_ex__ = _pickling.reduce_ex

    # Fields.
    select = _fields.select
    pop = _fields.pop
    rename = _fields.rename
    union = _fields.union
    to = _fields.to

    # Rows.
    slice = _rows.slice_rows
    select_idxs = _rows.select_idxs
    filter = _rows.keep_rows
    group_by = _rows.group_by
    reorder = _rows.reorder
    shuffle = _rows.shuffle
    chunk = _pieces.chunk
    split = _pieces.split
    concat = staticmethod(_pieces.concat)
    repeat = _repeats.repeat
    sample_level_repeat = _repeats.sample_level_repeat
    padding = _repeats.padding
    pad_to_divisor = _repeats.pad_dataproto_to_divisor
    unpad = _repeats.unpad_dataproto
    make_iterator = _pieces.make_iterator

    # The shape of rows.
    unfold_column_chunks = _shapes.unfold_column_chunks
    fold_batch_dim = _shapes.fold_batch_dim
    unfold_batch_dim = _shapes.unfold_batch_dim

    # For a reader.
    get_data_info = _text.get_data_info
    print_size = _text.print_size
    __repr__ = _text.get_data_info

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[Any, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """A batch from one dict per part. The dicts stay as they are; a list becomes one object per row.

        Args:
            tensors: per name, a tensor with one entry per row.
            non_tensors: per name, a numpy array (its dtype stays) or a list with one entry per row.
            meta_info: what belongs to the whole batch.
            num_batch_dims: only 1; see `fold_batch_dim` for rows of rows.
            auto_padding: only False; `pad_to_divisor` pads where it can be seen, and says by how much.

        Raises:
            BatchError: a field without rows, different numbers of rows, or one of the last two arguments.

        >>> import torch
        >>> from rlprims.data_proto import DataProto
        >>> DataProto.from_dict({"ids": torch.arange(2)}, {"images": [np.zeros((2, 2)), np.ones((2, 2))]})
        DataProto: 2 rows, 96 B
          batch             ids     int64   (2,)  16 B
          non_tensor_batch  images  object  (2,)  80 B
        """
        if num_batch_dims != 1:
            raise BatchError(
                f"num_batch_dims is {num_batch_dims}, it needs to be 1; use fold_batch_dim for rows of rows"
            )
        if auto_padding:
            raise BatchError(
                "auto_padding is not supported: it hides how many rows were added; use pad_to_divisor and unpad"
            )
        return cls(dict(tensors or {}), non_tensors, meta_info)

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, Any],
        meta_info: Mapping[Any, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """A batch from one dict: tensors go to ``batch``, numpy arrays and lists to ``non_tensor_batch``.

        Raises:
            BatchError: a value of another type, or different numbers of rows.

        >>> import torch
        >>> from rlprims.data_proto import DataProto
        >>> data = DataProto.from_single_dict({"ids": torch.arange(2), "uid": ["a", "b"]})
        >>> list(data.batch.keys()), list(data.non_tensor_batch)
        (['ids'], ['uid'])
        """
        tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in data.items() if not isinstance(value, Tensor)}
        return cls.from_dict(tensors, others, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(cls, tensordict: TensorDict, meta_info: Mapping[Any, Any] | None = None) -> Self:
        """A batch from a TensorDict: per-row objects become object columns, single objects metadata.

        Raises:
            BatchError: not one batch dimension, a nested TensorDict, or a name that ``meta_info`` has too.

        >>> import torch
        >>> from rlprims.data_proto import DataProto
        >>> data = DataProto.from_dict({"ids": torch.arange(2)}, {"uid": ["a", "b"]}, {"step": 1})
        >>> DataProto.from_tensordict(data.to_tensordict())
        DataProto: 2 rows, 32 B
          batch             ids   int64   (2,)  16 B
          non_tensor_batch  uid   object  (2,)  16 B
          meta_info         step  int     1
        """
        return cls(*_convert.parts_of_tensordict(tensordict, meta_info or {}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a batch that `save` wrote. The tensors are mapped from the file, so memory is used as they are read.

        Writes into the loaded tensors do not reach the file.

        Raises:
            BatchError: (a ValueError) no batch there, another version, or a file that was damaged, cut short or forged.
            ImportError: safetensors is not installed.

        >>> DataProto.load("/nowhere")
        Traceback (most recent call last):
        rlprims.data_proto._errors.BatchError: load: no batch at /nowhere: manifest.json is missing...
        """
        return cls(*_storage.load_parts(path))

    load_from_disk = load

    def check_consistency(self) -> None:
        """Raise a BatchError that says what does not fit, if a write into the parts has broken the batch.

        >>> import torch
        >>> from rlprims.data_proto import DataProto
        >>> data = DataProto.from_dict({"ids": torch.arange(2)})
        >>> data.non_tensor_batch["uid"] = np.array(["a"], dtype=object)
        >>> data.check_consistency()
        Traceback (most recent call last):
        rlprims.data_proto._errors.BatchError: fields have different numbers of rows: {'ids': 2, 'uid': 1, ...
        """
        columns(self)

    def __copy__(self) -> Self:
        return self.slice()

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((_columns.row_count(array) for array in self.non_tensor_batch.values()), 0)

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[index] for index in range(len(self)))

    def __contains__(self, name: object) -> bool:
        return part_of(self, name) is not None

    def __getitem__(self, key: str | int | Index) -> Any:
        """A field by its name, a row by its number, rows by a slice, indices or a mask."""
        if isinstance(key, str):
            part = part_of(self, key)
            if part is None:
                raise missing(self, key)
            return part[key]
        if isinstance(key, builtins.slice):
            return self.slice(key.start, key.stop, key.step)
        if isinstance(key, int | np.integer) or (isinstance(key, Tensor | np.ndarray) and key.ndim == 0):
            return self._row(key)
        return self.select_idxs(key)

    def _row(self, key: Any) -> DataProtoItem:
        tensors, arrays, _ = columns(self)
        if isinstance(key, bool) or "int" not in str(getattr(key, "dtype", "int")):
            raise BatchError(f"row index {key!r} needs to be an integer; index with a list or a mask for several rows")
        rows, index = len(self), int(key)
        if not -rows <= index < rows:
            raise RowIndexError(f"row {index} of a batch of {rows} rows; {fields(self)}")
        index %= rows
        batch = None
        if self.batch is not None:
            cells = {name: _columns.row(tensor, index) for name, tensor in tensors.items()}
            batch = TensorDict(cells, batch_size=[], device=self.batch.device)
        return DataProtoItem(batch, {name: array[index] for name, array in arrays.items()}, copied(self.meta_info))

    def __setitem__(self, name: str, value: Any) -> None:
        """Write a field: tensors to ``batch``, arrays and lists to ``non_tensor_batch``, the rest to ``meta_info``."""
        if not isinstance(name, str):
            raise BatchError(f"cannot assign to rows {name!r}; assign a whole field by its name")
        rows, part = columns(self).rows, part_of(self, name)
        if not _columns.is_column(value):
            if part is not None and part is not self.meta_info:
                raise BatchError(f"{name} has one entry per row, got {value!r}; {rows} entries are needed")
            self.meta_info[name] = value
            return
        if isinstance(value, Tensor):
            check_tensor(name, value)
        column = value if isinstance(value, Tensor) else as_array(name, value)
        count = _columns.row_count(column)
        if rows not in (None, count):
            raise BatchError(
                f"{name} has {count} rows, the batch has {rows}; give one entry per row, or write "
                f"data.meta_info[{name!r}] for what belongs to the whole batch; {fields(self)}"
            )
        if part is not None and part is not (self.batch if isinstance(column, Tensor) else self.non_tensor_batch):
            part.pop(name)  # a name is read from one part only
        if not isinstance(column, Tensor):
            self.non_tensor_batch[name] = column
        elif self.batch is None:
            self.batch = batch_of({name: column}, count)
        else:
            self.batch[name] = column
