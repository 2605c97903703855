"""One step of any trainer, from the file that it wrote. Nothing is unpickled."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rlprims.data_proto import DataProto
from rlprims.lab._rollouts import _batch, _lines, _record, load_trl, load_verl, words
from rlprims.runs.records import read_rollouts


def load_step(path: Path, step: int | None = None) -> dict[str, Any]:
    """The columns of a step: a saved ``DataProto``, tensors, rows (ours, verl's dump, TRL's log), or of a run."""
    if path.is_dir():
        return _fields(_recorded(path, step))
    if step is not None or not path.is_file():
        raise ValueError(f"{path}: No such file" if step is None else f"{path} is no run: a file has one step")
    with path.open("rb") as file:
        head = file.read(256)
    if b'"rlprims.data_proto' in head:
        return _fields(DataProto.load(path))
    if head[4:9] == b"\0\0\0\0{":  # the length of the header of safetensors
        try:
            return dict(load_file(path))
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from None
    if head.startswith((b"PK", b"\x80")):
        raise ValueError(f"{path} is a pickle, which runs code when it is read: save it with safetensors.torch")
    rows = _lines(path)
    if rows and {"input", "output"} <= rows[0].keys():
        return _fields(load_verl(path))
    return _fields(load_trl(rows) if rows and "completion" in rows[0] else _batch(rows, str(path), words))


def _recorded(run: Path, step: int | None) -> DataProto:
    """The rows that were trained on, with their recorded advantages."""
    rows = [row for row in read_rollouts(run, step) if row.advantages is not None and not row.is_left_out]
    numbers = dict.fromkeys(name for row in rows for name, x in row.columns.items() if isinstance(x, int | float))
    records = [_record(row, any(row.turn_ids for row in rows), numbers) for row in rows]
    for row, record in zip(rows, records, strict=True):
        record["advantages"] = [value or 0.0 for value in row.advantages or ()]
        record["shaped_scores"] = row.score if row.shaped_score is None else row.shaped_score
    return _batch(records, f"{run}, the trained rows of its step", words)


def _fields(data: DataProto) -> dict[str, Any]:
    """All fields by name; a number of the step in the place of a column that repeats it."""
    fields = {**data.meta_info, **dict(data.batch.items() if data.batch is not None else ()), **data.non_tensor_batch}
    for name in {"loss", "temperature"} & fields.keys():
        value = torch.as_tensor(fields[name]).double().flatten()
        if not (value == value[0]).all():
            raise ValueError(f"{name} differs between rows, expected one number of the step")
        fields[name] = float(value[0])
    return fields
