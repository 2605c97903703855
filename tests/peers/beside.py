"""Two containers side by side: one batch for both, and their answers as plain values.

A call is a function of P, the module that has the container: ``rlprims.interop.verl`` or ``verl.protocol``. Both have
``DataProto``, ``pad_dataproto_to_divisor``, ``unpad_dataproto``, ``fold_batch_dim`` and ``unfold_batch_dim``.
"""

import importlib
import math

import numpy as np
import torch

import examples.unfold_columns
from rlprims.data_proto import DataProto


def ours():
    return importlib.import_module("rlprims.interop.verl")


def verls():
    return importlib.import_module("verl.protocol")


def cells(*values):
    """An object array with one value per row, whatever the values are."""
    return np.fromiter(values, dtype=object, count=len(values))


def make(P, rows=4):
    """Columns of every kind that both can hold; row i has the i-th letter as its uid."""
    tensors = {
        "ids": torch.arange(4 * rows).view(rows, 4),
        "logp": -torch.arange(rows, dtype=torch.float64) / 7,
        "mask": torch.arange(2 * rows).view(rows, 2) % 3 == 0,
    }
    turns = cells(*([row] * (row % 3) for row in range(rows)))
    arrays = {"uid": cells(*"abcdefgh"[:rows]), "score": np.arange(rows) / 3, "turns": turns}
    return P.DataProto.from_dict(tensors, arrays, {"step": 3, "notes": {"tags": ["x"]}})


def of(P, tensors=(), arrays=(), meta=()):
    """A batch of tensors, object columns (one value per row, or an array) and metadata, each as pairs or a dict."""
    columns = {name: value if isinstance(value, np.ndarray) else cells(*value) for name, value in dict(arrays).items()}
    return P.DataProto.from_dict(
        {name: torch.as_tensor(value) for name, value in dict(tensors).items()}, columns, dict(meta)
    )


def objects(P, letters="ab"):
    """A batch without tensors."""
    return of(P, (), {"uid": letters})


def jagged(P, *lengths):
    rows = [torch.arange(float(length)) for length in lengths]
    return P.DataProto.from_dict({"tokens": torch.nested.nested_tensor(rows, layout=torch.jagged)})


def concat(P, *parts):
    return P.DataProto.concat([of(P, *part) for part in parts])


def reports(P, *metrics):
    """What concat makes of the metrics of workers."""
    return concat(P, *(({"x": [1]}, (), {"metrics": each}) for each in metrics)).meta_info


def uids(data):
    """Which rows, in which order."""
    return "".join(data.non_tensor_batch["uid"].tolist())


def names(data):
    return sorted([*data.batch.keys(), *data.non_tensor_batch])


def changed(data, answer):
    """What a call made: its answer, or where it answers None the batch that it changed."""
    return data if answer is None else answer


def after(data, use):
    """The batch after a use of it, even one that failed."""
    try:
        use(data)
    except Exception:
        return data
    return data


def broken(data):
    """With one object fewer than rows."""
    data.non_tensor_batch["uid"] = data.non_tensor_batch["uid"][1:]
    return data


def plain(value):
    """Nested lists and dicts with dtypes, the same for both containers; NaN equals itself."""
    if hasattr(value, "non_tensor_batch"):
        rows = None if value.batch is None else list(value.batch.batch_size)
        batch = None if value.batch is None else plain(dict(value.batch.items()))
        return {"rows": rows, "batch": batch, "objects": plain(value.non_tensor_batch), "meta": plain(value.meta_info)}
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return [str(value.dtype), *plain(value.unbind())]
        return [str(value.dtype), list(value.shape), plain(value.tolist())]
    if isinstance(value, np.ndarray):
        return [value.dtype.kind, list(value.shape), plain(value.tolist())]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def unfold_column_chunks(data, *arguments):
    """verl's method, or of this library's batch the function of the examples."""
    if isinstance(data, DataProto):
        return examples.unfold_columns.unfold_column_chunks(data, *arguments)
    return data.unfold_column_chunks(*arguments)
