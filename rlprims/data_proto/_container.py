"""The batch: rows of tensors, rows of objects, and metadata of the whole batch."""

from __future__ import annotations

import builtins
import copy
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Self, SupportsIndex, TypeAlias, TypeVar

import einops
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlprims.data_proto import _columns, _convert, _pickling, _storage
from rlprims.data_proto._columns import (
    Array,
    BatchError,
    Columns,
    MissingField,
    RowIndexError,
    as_array,
    batch_of,
    joined,
    listing,
    names,
    row_numbers,
    row_range,
)
from rlprims.data_proto._values import copied, difference, merged, same

D = TypeVar("D", bound="DataProto")
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
            raise BatchError(
                f"batch has batch_size {tuple(sizes)}, expected one batch dimension; see batch.flatten() and "
                "TensorDict.auto_batch_size_(batch_dims=1)"
            )
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
        """A batch from one dict per part, as for the class; all are optional. A list becomes one object per row.

        Raises:
            BatchError: a field without rows, or fields with different numbers of rows.

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

        >>> data = DataProto.from_dict({"ids": torch.arange(2)}, {"uid": ["a", "b"]}, {"step": 1})
        >>> list(DataProto.from_tensordict(data.to_tensordict()).non_tensor_batch)
        ['uid']
        """
        return cls(*_convert.parts_of_tensordict(tensordict, meta_info or {}))

    def to_tensordict(self) -> TensorDict:
        """One TensorDict of all fields: arrays become per-row objects (`NonTensorStack`), metadata `NonTensorData`.

        A TensorDict cannot store numpy columns, so `from_tensordict` returns them as object columns.

        Raises:
            BatchError: a name that two parts have, or a metadata key that is not a string.

        >>> DataProto.from_dict({"ids": torch.arange(2)}, {"uid": ["a", "b"]}).to_tensordict()["uid"] == ["a", "b"]
        True
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
        more than one number. They share their memory with the table if Arrow supports it. Arrow infers the type of
        objects.

        Raises:
            BatchError: a field for which Arrow has no type, such as objects of different kinds.
            ImportError: pyarrow is not installed.
        """
        return _convert.to_arrow(self._columns())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the batch to a directory, atomically: after a crash the directory has the earlier batch or this one.

        A batch that was saved at ``path`` is replaced. A crash may leave files that are not in the manifest. They are
        ignored and may be deleted.

        Raises:
            BatchError: a value that cannot be saved (the message names field and row), or other files at ``path``.
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
            BatchError: (a ValueError) no batch, another version, or a file that is damaged, truncated or forged.
            ImportError: safetensors is not installed.

        >>> DataProto.load("/nowhere")
        Traceback (most recent call last):
        rlprims.data_proto.BatchError: load: no batch at /nowhere: manifest.json is missing...
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

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(array) for array in self.non_tensor_batch.values()), 0)

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
            return self._row(key)
        return self.select_idxs(key)

    def _row(self, key: Any) -> DataProtoItem:
        tensors, arrays, _ = self._columns()
        if isinstance(key, bool) or "int" not in str(getattr(key, "dtype", "int")):
            raise BatchError(f"row index {key!r}, expected an integer; index with a list or a mask for several rows")
        rows, index = len(self), int(key)
        if not -rows <= index < rows:
            raise RowIndexError(f"row {index} of a batch of {rows} rows; {self._fields()}")
        index %= rows
        batch = None
        if self.batch is not None:
            cells = {name: _columns.row(tensor, index) for name, tensor in tensors.items()}
            batch = TensorDict(cells, batch_size=[], device=self.batch.device)
        return DataProtoItem(batch, {name: array[index] for name, array in arrays.items()}, copied(self.meta_info))

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

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[Any] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """A batch with only these fields; None keeps all of that part. Tensors are shared unless ``deepcopy``.

        Raises:
            MissingField: a name that its part does not have.

        >>> data = DataProto.from_dict({"ids": torch.arange(2), "x": torch.ones(2)}, {"uid": ["a", "b"]})
        >>> small = data.select(batch_keys=["ids"], non_tensor_batch_keys=[])
        >>> "ids" in small, "x" in small, "uid" in small
        (True, False, False)
        """
        tensors, arrays, rows = self._columns()
        kept_tensors = {name: tensors[name] for name in self._checked_names(tensors, batch_keys)}
        kept_arrays = {name: arrays[name].copy() for name in self._checked_names(arrays, non_tensor_batch_keys)}
        meta = {key: copied(self.meta_info[key]) for key in self._checked_names(self.meta_info, meta_info_keys)}
        if deepcopy:
            kept_tensors = {name: tensor.clone() for name, tensor in kept_tensors.items()}
            kept_arrays = copy.deepcopy(kept_arrays)
        return self._like(Columns(kept_tensors, kept_arrays, rows), meta)

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[Any] | None = None,
    ) -> Self:
        """Remove these fields from this batch and return them as a batch; None removes nothing from that part.

        Raises:
            MissingField: a name that its part does not have; then no field is removed.

        >>> data = DataProto.from_dict({"ids": torch.arange(2), "x": torch.ones(2)})
        >>> taken = data.pop(batch_keys=["x"])
        >>> "x" in taken, "x" in data
        (True, False)
        """
        removed = self.select(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        for name in removed.batch.keys() if removed.batch is not None else ():
            del self.batch[name]
        for name in removed.non_tensor_batch:
            del self.non_tensor_batch[name]
        for key in removed.meta_info:
            del self.meta_info[key]
        if not batch_keys:
            removed.batch = None
        return removed

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """The batch with fields renamed, in any part. All are renamed at once, so two fields may exchange names.

        Raises:
            MissingField: an old name that does not exist.
            BatchError: lists of different lengths, or a new name that another field has.

        >>> data = DataProto.from_dict({"ids": torch.arange(2)}, {"uid": ["a", "b"]})
        >>> data.rename(["ids", "uid"], ["input_ids", "prompt"])["prompt"].tolist()
        ['a', 'b']
        """
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise BatchError(
                f"rename: {len(old)} old names {names(old)} and {len(new)} new names {names(new)}; give pairs"
            )
        for name in old:
            self._part_of(name)
        to_new = dict(zip(old, new, strict=True))
        tensors, arrays, rows = self._columns()
        renamed = [to_new.get(name, name) for part in (tensors, arrays, self.meta_info) for name in part]
        taken = sorted({str(name) for name in to_new.values() if renamed.count(name) > 1})
        if taken or len(to_new) != len(old):
            raise BatchError(f"rename: more than one field would be named {names(taken or old)}; {self._fields()}")
        return self._like(
            Columns(
                {to_new.get(name, name): tensor for name, tensor in tensors.items()},
                {to_new.get(name, name): array.copy() for name, array in arrays.items()},
                rows,
            ),
            {to_new.get(key, key): copied(value) for key, value in self.meta_info.items()},
        )

    def union(self, other: DataProto) -> Self:
        """The fields of both. A field that is in both must have the same values; NaN counts as equal to NaN.

        Tensors that share their memory are not compared, so the union with a batch derived from this one is cheap.

        Raises:
            BatchError: different numbers of rows, or a field that differs; the message names it and the difference.

        >>> data = DataProto.from_dict({"ids": torch.arange(2)})
        >>> scored = data.union(DataProto.from_dict({"scores": torch.ones(2)}))
        >>> scored["scores"].tolist(), "scores" in data
        ([1.0, 1.0], False)
        """
        mine, theirs = self._columns(), other._columns()
        if mine.rows is not None and theirs.rows is not None and mine.rows != theirs.rows:
            raise BatchError(
                f"union: {mine.rows} rows and {theirs.rows} rows, expected the same rows in the same order (repeat "
                f"the smaller one?); {self._fields()}; other {other._fields()}"
            )
        all_mine, all_theirs = mine.by_name(), theirs.by_name()
        for name in all_mine.keys() & all_theirs.keys():
            why = difference(all_mine[name], all_theirs[name])
            if why is not None:
                raise BatchError(f"union: both have {name!r} and {why}; rename or drop one of them; {self._fields()}")
        for key in self.meta_info.keys() & other.meta_info.keys():
            if not same(self.meta_info[key], other.meta_info[key]):
                raise BatchError(
                    f"union: both have meta_info[{key!r}] and it is {self.meta_info[key]!r} here and "
                    f"{other.meta_info[key]!r} there; rename or drop one of them; {self._fields()}"
                )
        # This batch comes first for the order of the fields, and last so that its values are used if both have a key.
        arrays = {**mine.arrays, **theirs.arrays, **mine.arrays}
        both = Columns(
            {**mine.tensors, **theirs.tensors, **mine.tensors},
            {name: array.copy() for name, array in arrays.items()},
            theirs.rows if mine.rows is None else mine.rows,
        )
        return self._like(both, copied({**self.meta_info, **other.meta_info, **self.meta_info}))

    def to(self, device: torch.device | str | int) -> Self:
        """The batch with its tensors on a device; tensors that are there already are shared.

        >>> DataProto.from_dict({"ids": torch.arange(2)}).to("cpu").batch.device
        device(type='cpu')
        """
        moved = self._columns().map(lambda x: x.to(device), lambda x: x.copy(), len(self))
        batch = None if self.batch is None else batch_of(moved.tensors, len(self), torch.device(device))
        return self._of(batch, moved.arrays)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Rows from start to end, counted as Python's slices are. Without a step the tensors are views.

        Raises:
            BatchError: a step of 0.

        >>> data = DataProto.from_dict({"ids": torch.arange(5)})
        >>> data.slice(1, 3)["ids"].tolist(), data[::-2]["ids"].tolist()
        ([1, 2], [4, 2, 0])
        """
        if step == 0:
            raise BatchError("slice: step is 0, expected another integer")
        rows = range(len(self))[start:end:step]
        if rows.step == 1:
            return self._like(self._columns().narrow(rows.start, max(rows.start, rows.stop)))
        return self._gather(row_range(len(rows)) * rows.step + rows.start)

    def select_idxs(self, idxs: list[Any] | range | Array | Tensor) -> Self:
        """The rows with these numbers (negative ones count from the end, repeats are allowed), or those of a mask.

        Consecutive rows are views; other rows are copied once.

        Raises:
            BatchError: an index that is neither integers nor a mask, or a mask without one entry per row.
            RowIndexError: a number that no row has.

        >>> data = DataProto.from_dict({"ids": torch.arange(4)})
        >>> data.select_idxs([3, 0, 0])["ids"].tolist(), data[torch.tensor([True, False, True, False])]["ids"].tolist()
        ([3, 0, 0], [0, 2])
        """
        return self._gather(row_numbers(idxs, len(self), "select_idxs", self._fields()))

    def filter(self, keep: list[bool] | Array | Tensor | Callable[[Self], Any]) -> Self:
        """The rows where a mask is true. A function is called with the whole batch and must return the mask.

        Raises:
            BatchError: anything other than one boolean per row.

        >>> data = DataProto.from_dict({"scores": torch.tensor([0.0, 1.0, 0.5])}, {"uid": ["a", "b", "c"]})
        >>> data.filter(lambda batch: batch["scores"] > 0)["uid"].tolist()
        ['b', 'c']
        """
        mask = keep(self) if callable(keep) else keep
        if isinstance(mask, list):
            mask = np.array(mask, dtype=bool if not mask else None)
        if "bool" not in str(getattr(mask, "dtype", None)):
            kind = getattr(mask, "dtype", type(mask).__name__)
            raise BatchError(f"filter: keep is {kind}, expected one boolean per row; use select_idxs for row numbers")
        return self._gather(row_numbers(mask, len(self), "filter", self._fields()))

    def group_by(self, key: str) -> dict[Hashable, Self]:
        """A batch of the rows for each distinct value of a field. Groups and rows keep their order.

        All rows are gathered once, and the groups are views of the result.

        Raises:
            MissingField: no such field.
            BatchError: the field is not a column with one hashable value per row.

        >>> data = DataProto.from_dict({"ids": torch.arange(4)}, {"uid": ["b", "a", "b", "a"]})
        >>> {uid: group["ids"].tolist() for uid, group in data.group_by("uid").items()}
        {'b': [0, 2], 'a': [1, 3]}
        """
        part = self._part_of(key)
        column = part[key]
        if part is self.meta_info or column.ndim != 1 or getattr(column, "is_nested", False):
            raise BatchError(f"group_by: expected {key} to be a column with one value per row; {self._fields()}")
        seen: dict[Any, int] = {}
        try:
            ids = torch.tensor([seen.setdefault(label, len(seen)) for label in column.tolist()], device="cpu").long()
        except TypeError as error:
            raise BatchError(
                f"group_by: {key} has a value that cannot be a dict key ({error}); group by another"
            ) from None
        grouped = self._gather(ids.argsort(stable=True))
        return dict(zip(seen, grouped._split(ids.bincount(minlength=len(seen)).tolist()), strict=True))

    def reorder(self, indices: list[int] | Array | Tensor) -> Self:
        """A batch with all rows in another order: row i of the result is row ``indices[i]``. This batch is unchanged.

        Raises:
            BatchError: indices that do not contain each row exactly once; use `select_idxs` for those.

        >>> DataProto.from_dict({"ids": torch.arange(3)}).reorder([2, 0, 1])["ids"].tolist()
        [2, 0, 1]
        """
        numbers = row_numbers(indices, len(self), "reorder", self._fields())
        if not torch.equal(numbers.sort().values, row_range(len(self))):
            raise BatchError(
                f"reorder: {numbers.numel()} indices for {len(self)} rows, expected each row exactly once; use "
                "select_idxs to drop or repeat rows"
            )
        return self._gather(numbers)

    def shuffle(self, generator: torch.Generator) -> Self:
        """All rows in a random order, drawn from the generator.

        >>> data = DataProto.from_dict({"ids": torch.arange(3)})
        >>> sorted(data.shuffle(torch.Generator().manual_seed(0))["ids"].tolist())
        [0, 1, 2]
        """
        return self._gather(torch.randperm(len(self), generator=generator, device=generator.device).cpu())

    def chunk(self, chunks: int, *, pad: bool = False) -> list[Self]:
        """Equal parts, as views. With ``pad`` missing rows are added as in `pad_to_divisor`.

        Only the parts with added rows are copied. They have ``-len(self) % chunks`` added rows in all, at the end:
        `concat` the results, then `unpad`.

        Raises:
            BatchError: the rows do not divide; use ``pad``, or `split`.

        >>> [part["ids"].tolist() for part in DataProto.from_dict({"ids": torch.arange(4)}).chunk(2)]
        [[0, 1], [2, 3]]
        >>> [part["ids"].tolist() for part in DataProto.from_dict({"ids": torch.arange(3)}).chunk(2, pad=True)]
        [[0, 1], [2, 0]]
        """
        rows = len(self)
        if chunks < 1 or (rows % chunks and not pad):
            raise BatchError(
                f"chunk: {rows} rows do not divide into {chunks} equal parts; use pad=True, or split(size), whose last "
                f"part may be smaller; {self._fields()}"
            )
        size = -(-rows // chunks)
        if not rows % chunks:
            return self._split([size] * chunks)
        whole = rows // size
        last = (row_range((chunks - whole) * size) + whole * size) % rows
        padded = self._like(self._columns().take(last))
        return self.slice(0, whole * size)._split([size] * whole) + padded._split([size] * (chunks - whole))

    def split(self, split_size: int) -> list[Self]:
        """Parts of ``split_size`` rows, as views; the last may be smaller. Zero rows give no part.

        Raises:
            BatchError: a size below 1.

        >>> [part["ids"].tolist() for part in DataProto.from_dict({"ids": torch.arange(3)}).split(2)]
        [[0, 1], [2]]
        """
        if split_size < 1:
            raise BatchError(f"split: split_size is {split_size}, expected at least 1")
        rows = len(self)
        return self._split([min(split_size, rows - start) for start in range(0, rows, split_size)])

    @staticmethod
    def concat(data: Sequence[D]) -> D:
        """The batches concatenated along the rows, copied once.

        A key of ``meta_info`` that several batches have must have equal values. The exception is
        ``meta_info["metrics"]`` (a dict, or a list of dicts, per worker): it is collected into one dict of lists.

        Raises:
            BatchError: no batches; fields, shapes, dtypes or devices that differ; metadata that differ.

        >>> a = DataProto.from_dict({"ids": torch.arange(2)}, meta_info={"step": 1, "metrics": {"loss": 0.5}})
        >>> b = DataProto.from_dict({"ids": torch.arange(3)}, meta_info={"step": 1, "metrics": {"loss": 0.7}})
        >>> both = DataProto.concat([a, b])
        >>> both["ids"].tolist(), both.meta_info
        ([0, 1, 0, 1, 2], {'step': 1, 'metrics': {'loss': [0.5, 0.7]}})
        """
        parts = list(data)
        if not parts:
            raise BatchError("concat: got no batches, expected at least one, which defines the fields")
        all_columns = [part._columns() for part in parts]
        for position, part in enumerate(all_columns):
            for mine, theirs in ((all_columns[0].tensors, part.tensors), (all_columns[0].arrays, part.arrays)):
                if mine.keys() != theirs.keys():
                    unshared = sorted(mine.keys() ^ theirs.keys())
                    raise BatchError(
                        f"concat: only one of part 0 and part {position} has {names(unshared)}; select the fields that "
                        f"all parts have; part 0 {parts[0]._fields()}; part {position} {parts[position]._fields()}"
                    )
        return parts[0]._like(joined(all_columns), merged([part.meta_info for part in parts]))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Every row several times: a a b b if interleaved, else a b a b.

        Raises:
            BatchError: a negative number of times.

        >>> data = DataProto.from_dict({"ids": torch.arange(2)})
        >>> data.repeat(2)["ids"].tolist(), data.repeat(2, interleave=False)["ids"].tolist()
        ([0, 0, 1, 1], [0, 1, 0, 1])
        """
        if repeat_times < 0:
            raise BatchError(f"repeat: repeat_times is {repeat_times}, expected at least 0")
        if repeat_times == 1:
            return self.slice()
        pattern = "row -> (row copy)" if interleave else "row -> (copy row)"
        return self._like(self._columns().take(einops.repeat(row_range(len(self)), pattern, copy=repeat_times)))

    def pad_to_divisor(self, size_divisor: int) -> tuple[Self, int]:
        """Add rows until the divisor divides their number; returns the batch and the number of added rows.

        The added rows repeat the batch from its first row. Zero rows stay zero rows. `unpad` removes the added rows.

        Raises:
            BatchError: a divisor below 1.

        >>> padded, added = DataProto.from_dict({"ids": torch.arange(3)}).pad_to_divisor(4)
        >>> padded["ids"].tolist(), added, padded.unpad(added)["ids"].tolist()
        ([0, 1, 2, 0], 1, [0, 1, 2])
        """
        if size_divisor < 1:
            raise BatchError(f"pad_to_divisor: size_divisor is {size_divisor}, expected at least 1")
        rows = len(self)
        added = -rows % size_divisor
        return self._extended(row_range(added) % max(rows, 1)), added

    def unpad(self, pad_size: int) -> Self:
        """The batch without its last ``pad_size`` rows.

        Raises:
            BatchError: fewer rows than that, or a negative number.

        >>> DataProto.from_dict({"ids": torch.arange(3)}).unpad(1)["ids"].tolist()
        [0, 1]
        """
        if not 0 <= pad_size <= len(self):
            raise BatchError(f"unpad: cannot take {pad_size} rows off {len(self)}; pass what pad_to_divisor returned")
        return self.slice(0, len(self) - pad_size)

    def _columns(self) -> Columns:
        """The columns, checked, because a caller may have written into ``batch`` or ``non_tensor_batch`` directly."""
        for name, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray) or array.ndim == 0:
                raise BatchError(
                    f"non_tensor_batch[{name!r}] is {type(array).__name__}, expected a numpy array with one entry per "
                    f"row; assign with data[{name!r}] = [...], or keep it in meta_info; {self._fields()}"
                )
        tensors = {} if self.batch is None else dict(self.batch.items())
        return _columns.checked(tensors, self.non_tensor_batch, self.batch)

    def _like(self, columns: Columns, meta_info: dict[Any, Any] | None = None) -> Self:
        """A batch of the same type. The arrays and ``meta_info`` must not be shared; None copies this metadata."""
        tensors, arrays, rows = columns
        keep_batch = rows is not None and (tensors or self.batch is not None)
        device = self.batch.device if self.batch is not None else None
        return self._of(batch_of(tensors, rows or 0, device) if keep_batch else None, arrays, meta_info)

    def _of(self, batch: Any, arrays: Mapping[str, Array], meta_info: dict[Any, Any] | None = None) -> Self:
        """A batch of the same type from parts that are not shared. They are not checked again."""
        new = object.__new__(type(self))
        new.batch = batch
        new.non_tensor_batch = dict(arrays)
        new.meta_info = copied(self.meta_info) if meta_info is None else meta_info
        return new

    def _gather(self, numbers: Tensor) -> Self:
        """The rows with these numbers: one copy, or views if they are consecutive."""
        count = numbers.numel()
        start = int(numbers[0]) if count else 0
        consecutive = torch.equal(numbers, row_range(count) + start)
        columns = self._columns()
        return self._like(columns.narrow(start, start + count) if consecutive else columns.take(numbers))

    def _split(self, sizes: Sequence[int]) -> list[Self]:
        """All rows as views, in parts of these sizes. Each column is checked and split once."""
        columns = self._columns()
        tensors, arrays, rows = columns
        bounds = list(pairwise(accumulate(sizes, initial=0)))
        if not tensors or any(tensor.is_nested for tensor in tensors.values()):
            # A TensorDict cannot split a jagged column.
            return [self._like(columns.narrow(start, stop)) for start, stop in bounds]
        batches = batch_of(tensors, rows or 0, self.batch.device).split(list(sizes)) if sizes else ()
        return [
            self._of(batch, {name: array[start:stop].copy() for name, array in arrays.items()})
            for batch, (start, stop) in zip(batches, bounds, strict=True)
        ]

    def _extended(self, numbers: Tensor) -> Self:
        """All rows, followed by the rows with these numbers: one copy, or views if none are added."""
        columns = self._columns()
        return self._like(joined([columns, columns.take(numbers)])) if numbers.numel() else self.slice()

    def _fields(self) -> str:
        """The existing fields by part, for a message."""
        return listing(self.batch, self.non_tensor_batch, self.meta_info)

    def _find(self, name: object) -> Any:
        """The part that has a field, to read or to pop from; None if there is none."""
        if self.batch is not None and name in self.batch.keys():  # noqa: SIM118 - a TensorDict has no other `in`
            return self.batch
        return next((part for part in (self.non_tensor_batch, self.meta_info) if name in part), None)

    def _part_of(self, name: object) -> Any:
        if (part := self._find(name)) is None:
            raise MissingField(f"no field {name!r}; {self._fields()}")
        return part

    def _checked_names(self, part: Mapping[Any, Any], wanted: Iterable[Any] | None) -> list[Any]:
        """The names in ``wanted``, which must be in the part; None: all names of the part."""
        wanted = [wanted] if isinstance(wanted, str) else wanted
        found = list(part) if wanted is None else list(wanted)
        for name in found:
            if name not in part:
                raise MissingField(f"no field {name!r}; {self._fields()}")
        return found
