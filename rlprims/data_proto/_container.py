"""The batch: rows of tensors, rows of objects, and metadata of the whole batch."""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterator, Mapping
from typing import Any, Self, SupportsIndex, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlprims.data_proto import _columns, _combine, _convert, _pickling, _rows, _storage
from rlprims.data_proto._columns import Array, BatchError, as_array, batch_of
from rlprims.data_proto._parts import Parts
from rlprims.data_proto._rows import DataProtoItem
from rlprims.data_proto._values import copied

Index: TypeAlias = "builtins.slice[Any, Any, Any] | range | list[Any] | Array | Tensor"


class DataProto(Parts):
    """A batch for post-training: ``batch`` (TensorDict or None), ``non_tensor_batch`` (numpy arrays), ``meta_info``.

    ``data["name"]`` reads a field of any of the three. Every method returns a new batch and does not change this one;
    only item assignment and `pop` change it. What a result shares with its batch:

    - tensors are not copied when a batch is made; contiguous rows are views, other rows are copied once.
      An in-place write into a tensor of a result may therefore change the batch that it came from;
    - numpy arrays of a result are copies; the objects in their cells are shared;
    - ``meta_info`` of a result is a copy at every depth.

    A tensor may be a jagged nested tensor (``torch.nested``, ``layout=torch.jagged``). A batch may have zero rows.

    Args:
        batch: a TensorDict with one batch dimension, or a dict of tensors with the same number of rows, or None.
        non_tensor_batch: per name, a numpy array with that number of rows, or a list with one object per row.
        meta_info: the values of the whole batch.

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
            see = "batch.flatten() and TensorDict.auto_batch_size_(batch_dims=1)"
            raise BatchError(f"batch has batch_size {tuple(sizes)}, expected one batch dimension; see {see}")
        self.non_tensor_batch = {name: as_array(name, value) for name, value in (non_tensor_batch or {}).items()}
        self.meta_info = {key: copied(value) for key, value in (meta_info or {}).items()}
        given: Any = batch if sizes is not None else None
        tensors = {} if batch is None else dict(batch.items())
        rows = _columns.checked(tensors, self.non_tensor_batch, given).rows
        # A new TensorDict with the same tensors, so that assigning a field here does not add it to the caller's.
        keep = tensors or given is not None
        self.batch = batch_of(tensors, rows or 0, getattr(given, "device", None)) if keep else None

    def check_consistency(self) -> None:
        """Raise a BatchError if a write into the parts has made the batch inconsistent.

        >>> data = DataProto.from_dict({"ids": torch.arange(2)})
        >>> data.non_tensor_batch["uid"] = np.array(["a"], dtype=object)
        >>> data.check_consistency()
        Traceback (most recent call last):
        rlprims.data_proto.BatchError: fields have different numbers of rows: {'ids': 2, 'uid': 1, ...
        """
        self._columns()

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[Any, Any] | None = None,
    ) -> Self:
        """A batch from one dict per part, with the errors of the class; all are optional.

        >>> DataProto.from_dict({"ids": torch.arange(2)}, {"images": [np.zeros((2, 2)), np.ones((2, 2))]})
        DataProto: 2 rows, 96 B
          batch             ids     int64   (2,)  16 B
          non_tensor_batch  images  object  (2,)  80 B
        """
        return cls(dict(tensors or {}), non_tensors, meta_info)

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[Any, Any] | None = None) -> Self:
        """A batch from one dict: tensors go to ``batch``, numpy arrays and lists to ``non_tensor_batch``.

        Raises:
            BatchError: a value of another type, or different numbers of rows.

        >>> data = DataProto.from_single_dict({"ids": torch.arange(2), "uid": ["a", "b"]})
        >>> list(data.batch.keys()), list(data.non_tensor_batch)
        (['ids'], ['uid'])
        """
        tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in data.items() if not isinstance(value, Tensor)}
        return cls.from_dict(tensors, others, meta_info)

    @classmethod
    def from_tensordict(cls, tensordict: TensorDict, meta_info: Mapping[Any, Any] | None = None) -> Self:
        """A batch from a TensorDict: per-row objects become object columns, single objects become metadata.

        Raises:
            BatchError: not one batch dimension, a nested TensorDict, or a name that is also in ``meta_info``.
        """
        return cls(*_convert.parts_of_tensordict(tensordict, meta_info or {}))

    def to_tensordict(self) -> TensorDict:
        """One TensorDict of all fields: arrays become per-row objects (`NonTensorStack`), metadata `NonTensorData`.

        A TensorDict cannot store numpy columns, so `from_tensordict` returns them as object columns.

        Raises:
            BatchError: a name that two parts have, or a metadata key that is not a string.

        >>> data = DataProto.from_dict({"ids": torch.arange(2)}, {"uid": ["a", "b"]}, {"step": 1})
        >>> DataProto.from_tensordict(data.to_tensordict())["uid"].tolist()
        ['a', 'b']
        """
        return _convert.to_tensordict(self._columns(), self.meta_info, getattr(self.batch, "device", None))

    def to_pandas(self) -> Any:
        """A pandas DataFrame for reading: one line per row, one column per field.

        A column with one number per row keeps its dtype (bfloat16 and float8 as float32); with more numbers each row
        becomes nested lists. Objects are not changed, except that arrays and tensors become nested lists.

        Raises:
            ImportError: pandas is not installed.
        """
        return _convert.to_pandas(self._columns())

    def to_arrow(self) -> Any:
        """A pyarrow Table, for example to write to Parquet: one line per row, one column per field.

        Tensors and numeric arrays keep their dtype (bfloat16 and float8 as float32), as lists of lists if a row has
        more than one number. They share their memory with the table if Arrow can. Arrow infers the type of objects.

        Raises:
            BatchError: a field for which Arrow has no type, such as objects of different kinds.
            ImportError: pyarrow is not installed.
        """
        return _convert.to_arrow(self._columns())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the batch to a file, atomically: after a crash the file has the earlier batch or this one.

        A batch at ``path`` is replaced. A crash may leave a file ``.NAME.*`` beside it, which may be deleted.

        Raises:
            BatchError: a value that cannot be saved (the message names field and row), or something else at ``path``.
            ImportError: safetensors is not installed.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     DataProto.from_dict({"ids": torch.arange(2)}, {"uid": ["a", "b"]}).save(f"{folder}/batch")
        ...     DataProto.load(f"{folder}/batch")["uid"].tolist()
        ['a', 'b']
        """
        _storage.save(path, self._columns(), self.meta_info, has_batch=self.batch is not None)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a batch that `save` wrote. The tensors are mapped from the file: memory is used when they are read.

        Writes into the loaded tensors do not change the file.

        Raises:
            BatchError: no batch, another version, or a file that is damaged, truncated or forged.
            ImportError: safetensors is not installed.
        """
        return cls(*_storage.load_parts(path))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """For pickle: the type of the batch and its parts. The autograd graph is not pickled.

        >>> import pickle
        >>> data, buffers = DataProto.from_dict({"ids": torch.arange(3)}), []
        >>> stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
        >>> pickle.loads(stream, buffers=buffers)["ids"].data_ptr() == data["ids"].data_ptr()
        True
        """
        return _pickling.reduce_ex(self, protocol)

    def __repr__(self) -> str:
        """A table of the fields: part, name, dtype, shape, bytes. Notebooks show it too.

        The bytes of an object column count its pointers and the arrays in it, not other objects.
        """
        # An inconsistent batch must be printable too, so nothing is checked here.
        batch = {} if self.batch is None else self.batch
        return _convert.table(type(self).__name__, len(self), batch, self.non_tensor_batch, self.meta_info)

    def __contains__(self, name: object) -> bool:
        return self._find(name) is not None

    def __copy__(self) -> Self:
        return self.slice()

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, key: str | int | Index) -> Any:
        """A field by its name, a row by its number, rows by a slice, indices or a mask."""
        if isinstance(key, str):
            return self._part_of(key)[key]
        if isinstance(key, builtins.slice):
            return self.slice(key.start, key.stop, key.step)
        if isinstance(key, int | np.integer) or (isinstance(key, Tensor | np.ndarray) and key.ndim == 0):
            return _rows.item(self, key)
        return self.select_idxs(key)

    def __setitem__(self, name: str, value: Any) -> None:
        """Write a field: a tensor to ``batch``, an array or list to ``non_tensor_batch``, all else to ``meta_info``."""
        if not isinstance(name, str):
            raise BatchError(f"cannot assign to rows {name!r}; assign a whole field by its name")
        rows, part = self._columns().rows, self._find(name)
        if not _columns.is_column(value):
            if part is not None and part is not self.meta_info:
                raise BatchError(f"{name} has one entry per row, expected {rows} entries, got {value!r}")
            self.meta_info[name] = value
            return
        if isinstance(value, Tensor):
            _columns.check_tensor(name, value)
        column = value if isinstance(value, Tensor) else as_array(name, value)
        count = int(column.shape[0])
        if rows not in (None, count):
            raise BatchError(
                f"{name} has {count} rows, the batch has {rows}; give one entry per row, or write "
                f"data.meta_info[{name!r}] for a value of the whole batch; {self._fields()}"
            )
        if part is not None and part is not (self.batch if isinstance(column, Tensor) else self.non_tensor_batch):
            part.pop(name)  # a name is read from one part only
        if not isinstance(column, Tensor):
            self.non_tensor_batch[name] = column
        elif self.batch is None:
            self.batch = batch_of({name: column}, count)
        else:
            self.batch[name] = column

    def to(self, device: torch.device | str | int) -> Self:
        """The batch with its tensors on a device; tensors that are there already are shared.

        >>> DataProto.from_dict({"ids": torch.arange(2)}).to("cpu").batch.device
        device(type='cpu')
        """
        moved = self._columns().map(lambda x: x.to(device), lambda x: x.copy(), len(self))
        batch = None if self.batch is None else batch_of(moved.tensors, len(self), torch.device(device))
        return self._of(batch, moved.arrays)

    select = _combine.select
    pop = _combine.pop
    rename = _combine.rename
    union = _combine.union
    concat = staticmethod(_combine.concat)
    slice = _rows.slice_rows
    select_idxs = _rows.select_idxs
    filter = _rows.filter_rows
    group_by = _rows.group_by
    reorder = _rows.reorder
    shuffle = _rows.shuffle
    chunk = _rows.chunk
    split = _rows.split
    repeat = _rows.repeat
    pad_to_divisor = _rows.pad_to_divisor
    unpad = _rows.unpad
