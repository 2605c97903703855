"""Which fields a batch has: select, pop, rename, union, and where the tensors are."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlprims.data_proto._columns import Array
from rlprims.data_proto._equality import difference, same
from rlprims.data_proto._errors import BatchError, names
from rlprims.data_proto._meta import copied
from rlprims.data_proto._parts import D, batch_of, columns, derived, fields, missing, part_of

if TYPE_CHECKING:
    from rlprims.data_proto._container import DataProto


def select(
    data: D,
    batch_keys: Iterable[str] | None = None,
    non_tensor_batch_keys: Iterable[str] | None = None,
    meta_info_keys: Iterable[Any] | None = None,
    deepcopy: bool = False,
) -> D:
    """A batch with only these fields; None keeps all of that part. Tensors are shared unless ``deepcopy``.

    Raises:
        MissingField: a name that its part does not have.

    >>> from rlprims.data_proto import DataProto
    >>> data = DataProto.from_dict({"ids": torch.arange(2), "x": torch.ones(2)}, {"uid": ["a", "b"]})
    >>> small = data.select(batch_keys=["ids"], non_tensor_batch_keys=[])
    >>> "ids" in small, "x" in small, "uid" in small
    (True, False, False)
    """
    tensors, arrays, rows = columns(data)
    kept_tensors = {name: tensors[name] for name in _known(data, tensors, batch_keys)}
    kept_arrays = {name: arrays[name].copy() for name in _known(data, arrays, non_tensor_batch_keys)}
    meta = {key: copied(data.meta_info[key]) for key in _known(data, data.meta_info, meta_info_keys)}
    if deepcopy:
        kept_tensors = {name: tensor.clone() for name, tensor in kept_tensors.items()}
        kept_arrays = copy.deepcopy(kept_arrays)
    return derived(data, kept_tensors, kept_arrays, rows, meta)


def _known(data: DataProto, part: Any, wanted: Iterable[Any] | None) -> list[Any]:
    if isinstance(wanted, str):
        wanted = [wanted]
    chosen = list(part) if wanted is None else list(wanted)
    for name in chosen:
        if name not in part:
            raise missing(data, name)
    return chosen


def pop(
    data: D,
    batch_keys: Iterable[str] | None = None,
    non_tensor_batch_keys: Iterable[str] | None = None,
    meta_info_keys: Iterable[Any] | None = None,
) -> D:
    """Remove these fields from this batch and return them as a batch; None takes nothing of that part.

    Raises:
        MissingField: a name that its part does not have; then nothing has been removed.

    >>> from rlprims.data_proto import DataProto
    >>> data = DataProto.from_dict({"ids": torch.arange(2), "x": torch.ones(2)})
    >>> taken = data.pop(batch_keys=["x"])
    >>> "x" in taken, "x" in data
    (True, False)
    """
    chosen = select(data, batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
    for name in chosen.batch.keys() if chosen.batch is not None else ():
        del data.batch[name]
    for name in chosen.non_tensor_batch:
        del data.non_tensor_batch[name]
    for key in chosen.meta_info:
        del data.meta_info[key]
    if not batch_keys:
        chosen.batch = None
    return chosen


def rename(data: D, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> D:
    """The batch with fields renamed, in any part. Several are renamed at once, so two may change places.

    Raises:
        MissingField: an old name that does not exist.
        BatchError: lists of different lengths, or a new name that another field has.

    >>> from rlprims.data_proto import DataProto
    >>> data = DataProto.from_dict({"ids": torch.arange(2)}, {"uid": ["a", "b"]})
    >>> data.rename(["ids", "uid"], ["input_ids", "prompt"])["prompt"].tolist()
    ['a', 'b']
    """
    old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
    new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
    if len(old) != len(new):
        raise BatchError(f"rename: {len(old)} old names {names(old)} and {len(new)} new names {names(new)}; give pairs")
    for name in old:
        if part_of(data, name) is None:
            raise missing(data, name)
    to_new = dict(zip(old, new, strict=True))
    tensors, arrays, rows = columns(data)
    renamed = [to_new.get(name, name) for part in (tensors, arrays, data.meta_info) for name in part]
    taken = sorted({str(name) for name in to_new.values() if renamed.count(name) > 1})
    if taken or len(to_new) != len(old):
        raise BatchError(f"rename: more than one field would be named {names(taken or old)}; {fields(data)}")
    return derived(
        data,
        {to_new.get(name, name): tensor for name, tensor in tensors.items()},
        {to_new.get(name, name): array.copy() for name, array in arrays.items()},
        rows,
        {to_new.get(key, key): copied(value) for key, value in data.meta_info.items()},
    )


def union(data: D, other: DataProto) -> D:
    """The fields of both. A field that both have must be the same in both, where NaN is the same as NaN.

    Tensors that share their memory are not compared, so the union with a batch derived from this one is free.

    Raises:
        BatchError: different numbers of rows, or a field that differs; says which field and how.

    >>> from rlprims.data_proto import DataProto
    >>> data = DataProto.from_dict({"ids": torch.arange(2)})
    >>> scored = data.union(DataProto.from_dict({"scores": torch.ones(2)}))
    >>> scored["scores"].tolist(), "scores" in data
    ([1.0, 1.0], False)
    """
    mine, theirs = columns(data), columns(other)
    if mine.rows is not None and theirs.rows is not None and mine.rows != theirs.rows:
        raise BatchError(
            f"union: {mine.rows} rows and {theirs.rows} rows; both need the same rows in the same order (repeat the "
            f"smaller one?); {fields(data)}; other {fields(other)}"
        )
    all_mine: dict[str, Tensor | Array] = {**mine.tensors, **mine.arrays}
    all_theirs: dict[str, Tensor | Array] = {**theirs.tensors, **theirs.arrays}
    for name in all_mine.keys() & all_theirs.keys():
        why = difference(all_mine[name], all_theirs[name])
        if why is not None:
            raise BatchError(f"union: both have {name!r} and {why}; rename or drop one of them; {fields(data)}")
    for key in data.meta_info.keys() & other.meta_info.keys():
        if not same(data.meta_info[key], other.meta_info[key]):
            raise BatchError(
                f"union: both have meta_info[{key!r}] and it is {data.meta_info[key]!r} here and "
                f"{other.meta_info[key]!r} there; rename or drop one of them; {fields(data)}"
            )
    # This batch first for the order of the fields, and last so that it wins where both have one.
    return derived(
        data,
        {**mine.tensors, **theirs.tensors, **mine.tensors},
        {name: array.copy() for name, array in {**mine.arrays, **theirs.arrays, **mine.arrays}.items()},
        theirs.rows if mine.rows is None else mine.rows,
        copied({**data.meta_info, **other.meta_info, **data.meta_info}),
    )


def to(data: D, device: torch.device | str | int) -> D:
    """The batch with its tensors on a device; those that are there already are shared.

    >>> from rlprims.data_proto import DataProto
    >>> DataProto.from_dict({"ids": torch.arange(2)}).to("cpu").batch.device
    device(type='cpu')
    """
    tensors, arrays, rows = columns(data)
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    result = derived(data, {}, {name: array.copy() for name, array in arrays.items()}, rows)
    if result.batch is not None:
        result.batch = batch_of(moved, rows or 0, torch.device(device))
    return result
