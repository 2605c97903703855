"""The methods of a batch that choose or rename its fields, and those that combine batches."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlprims.data_proto._columns import BatchError, Columns, MissingField, joined, names
from rlprims.data_proto._parts import D, Parts
from rlprims.data_proto._values import copied, difference, same


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
    >>> data = DataProto.from_dict({}, {"uid": ["a", "b"], "score": [0.0, 1.0]}, {"step": 1})
    >>> small = data.select(non_tensor_batch_keys=["uid"])
    >>> "uid" in small, "score" in small, "step" in small
    (True, False, True)
    """
    tensors, arrays, rows = data._columns()
    kept_tensors = {name: tensors[name] for name in _checked(data, tensors, batch_keys)}
    kept_arrays = {name: arrays[name].copy() for name in _checked(data, arrays, non_tensor_batch_keys)}
    meta = {key: copied(data.meta_info[key]) for key in _checked(data, data.meta_info, meta_info_keys)}
    if deepcopy:
        kept_tensors = {name: tensor.clone() for name, tensor in kept_tensors.items()}
        kept_arrays = copy.deepcopy(kept_arrays)
    return data._like(Columns(kept_tensors, kept_arrays, rows), meta)


def _checked(data: Parts, part: Mapping[Any, Any], wanted: Iterable[Any] | None) -> list[Any]:
    """The names in ``wanted``, which must be in the part; None: all names of the part."""
    found = list(part) if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)
    for name in found:
        if name not in part:
            raise MissingField(f"no field {name!r}; {data._fields()}")
    return found


def pop(
    data: D,
    batch_keys: Iterable[str] | None = None,
    non_tensor_batch_keys: Iterable[str] | None = None,
    meta_info_keys: Iterable[Any] | None = None,
) -> D:
    """Remove these fields from this batch and return them as a batch; None removes nothing from that part.

    Raises:
        MissingField: a name that its part does not have; then no field is removed.

    >>> from rlprims.data_proto import DataProto
    >>> data = DataProto.from_dict({}, {"uid": ["a", "b"], "score": [0.0, 1.0]})
    >>> taken = data.pop(non_tensor_batch_keys=["score"])
    >>> "score" in taken, "score" in data
    (True, False)
    """
    removed = select(data, batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
    for name in removed.batch.keys() if removed.batch is not None else ():
        del data.batch[name]
    for name in removed.non_tensor_batch:
        del data.non_tensor_batch[name]
    for key in removed.meta_info:
        del data.meta_info[key]
    if not batch_keys:
        removed.batch = None
    return removed


def rename(data: D, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> D:
    """The batch with fields renamed, in any part. All are renamed at once, so two fields may exchange names.

    Raises:
        MissingField: an old name that does not exist.
        BatchError: lists of different lengths, or a new name that another field has.

    >>> from rlprims.data_proto import DataProto
    >>> DataProto.from_dict({}, {"uid": ["a", "b"]}).rename("uid", "prompt")["prompt"].tolist()
    ['a', 'b']
    """
    old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
    new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
    if len(old) != len(new):
        raise BatchError(f"rename: {len(old)} old names {names(old)} and {len(new)} new names {names(new)}; give pairs")
    for name in old:
        data._part_of(name)
    to_new = dict(zip(old, new, strict=True))
    tensors, arrays, rows = data._columns()
    renamed = [to_new.get(name, name) for part in (tensors, arrays, data.meta_info) for name in part]
    taken = sorted({str(name) for name in to_new.values() if renamed.count(name) > 1})
    if taken or len(to_new) != len(old):
        raise BatchError(f"rename: more than one field would be named {names(taken or old)}; {data._fields()}")
    tensors = {to_new.get(name, name): tensor for name, tensor in tensors.items()}
    arrays = {to_new.get(name, name): array.copy() for name, array in arrays.items()}
    meta = {to_new.get(key, key): copied(value) for key, value in data.meta_info.items()}
    return data._like(Columns(tensors, arrays, rows), meta)


def union(data: D, other: Parts) -> D:
    """The fields of both. A field that is in both must have the same values; NaN counts as equal to NaN.

    Tensors that share their memory are not compared, so the union with a batch derived from this one is cheap.

    Raises:
        BatchError: different numbers of rows, or a field that differs; the message names it and the difference.

    >>> from rlprims.data_proto import DataProto
    >>> data = DataProto.from_dict({}, {"uid": ["a", "b"]})
    >>> scored = data.union(DataProto.from_dict({}, {"score": [0.0, 1.0]}))
    >>> "uid" in scored, "score" in scored, "score" in data
    (True, True, False)
    """
    mine, theirs = data._columns(), other._columns()
    if mine.rows is not None and theirs.rows is not None and mine.rows != theirs.rows:
        raise BatchError(
            f"union: {mine.rows} rows and {theirs.rows} rows, expected the same rows in the same order (repeat "
            f"the smaller one?); {data._fields()}; other {other._fields()}"
        )
    all_mine, all_theirs = mine.by_name(), theirs.by_name()
    for name in all_mine.keys() & all_theirs.keys():
        if (why := difference(all_mine[name], all_theirs[name])) is not None:
            raise BatchError(f"union: both have {name!r} and {why}; rename or drop one of them; {data._fields()}")
    for key in data.meta_info.keys() & other.meta_info.keys():
        if not same(data.meta_info[key], other.meta_info[key]):
            raise BatchError(
                f"union: both have meta_info[{key!r}] and it is {data.meta_info[key]!r} here and "
                f"{other.meta_info[key]!r} there; rename or drop one of them; {data._fields()}"
            )
    # This batch comes first for the order of the fields, and last so that its values are used if both have a key.
    tensors = {**mine.tensors, **theirs.tensors, **mine.tensors}
    arrays = {name: x.copy() for name, x in {**mine.arrays, **theirs.arrays, **mine.arrays}.items()}
    meta = copied({**data.meta_info, **other.meta_info, **data.meta_info})
    return data._like(Columns(tensors, arrays, theirs.rows if mine.rows is None else mine.rows), meta)


def concat(data: Sequence[D]) -> D:
    """The batches concatenated along the rows, copied once.

    A key of ``meta_info`` that several batches have must have equal values. The exception is
    ``meta_info["metrics"]`` (a dict, or a list of dicts, per worker): it is collected into one dict of lists.

    Raises:
        BatchError: no batches; fields, shapes, dtypes or devices that differ; metadata that differ.

    >>> from rlprims.data_proto import DataProto
    >>> a = DataProto.from_dict({}, {"uid": ["a"]}, {"step": 1, "metrics": {"loss": 0.5}})
    >>> b = DataProto.from_dict({}, {"uid": ["b", "c"]}, {"step": 1, "metrics": {"loss": 0.7}})
    >>> both = DataProto.concat([a, b])
    >>> both["uid"].tolist(), both.meta_info
    (['a', 'b', 'c'], {'step': 1, 'metrics': {'loss': [0.5, 0.7]}})
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


def merged(metas: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
    """The ``meta_info`` of several workers, as :func:`concat` says. A worker may lack some of the metrics, or all."""
    result: dict[Any, Any] = {}
    reports: list[dict[Any, Any]] = []
    for position, meta in enumerate(metas):
        for key, value in meta.items():
            if key == "metrics":
                reports.extend(_reports(value, position))
            elif key not in result:
                result[key] = copied(value)
            elif not same(result[key], value):
                both = f"{result[key]!r} in an earlier part and {value!r} in part {position}"
                fix = "make them equal, drop the key, or put values that differ per worker in meta_info['metrics']"
                raise BatchError(f"concat: meta_info[{key!r}] is {both}; {fix}")
    if reports:
        lists = result["metrics"] = {}
        for report in reports:
            for name, value in report.items():
                # A list comes from an earlier concat. Extending it gives for nested concats the same as for one concat.
                lists.setdefault(name, []).extend(copied(value if isinstance(value, list) else [value]))
    return result


def _reports(value: Any, position: int) -> list[dict[Any, Any]]:
    reports = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(report, dict) for report in reports):
        wanted = "a dict of name to value, a list of such dicts, or None"
        raise BatchError(f"concat: meta_info['metrics'] of part {position} is {value!r}, expected {wanted}")
    return reports
