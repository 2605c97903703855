"""A batch with a field of every kind, and the plain view of one."""

from importlib.metadata import version

import numpy as np
import torch

from rlprims.interop.verl import DataProto

HAS_OBJECTS_OF_NO_ROWS = tuple(map(int, version("tensordict").split(".")[:2])) >= (0, 15)
"""Older ones cannot hold such a column, and ``to_tensordict`` says so."""


def jagged(rows: list[list[float]]) -> torch.Tensor:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
    values = torch.tensor([value for row in rows for value in row], dtype=torch.float32)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def make(rows: int) -> DataProto:
    """A batch with one field of every kind; row i of every field says i."""
    return DataProto.from_dict(
        {
            "ids": torch.arange(rows * 2).view(rows, 2),
            "logp": torch.arange(rows, dtype=torch.float64) / 7,
            "tokens": jagged([[float(row)] * (row % 3) for row in range(rows)]),
        },
        {
            "uid": [f"u{row}" for row in range(rows)],
            "score": np.arange(rows, dtype=np.float64) / 3,
            "image": [np.full((2, row % 2 + 1), row) for row in range(rows)],
        },
        {"step": 3, "notes": {"tags": ["a"]}},
    )


def rows_of(data: DataProto) -> list[dict[str, object]]:
    """The batch as a list of dicts of plain values, read row by row."""

    def plain(value: object) -> object:
        value = value.tolist() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value
        return [plain(item) for item in value] if isinstance(value, list) else value

    rows = []
    for item in data:
        row = {name: plain(value) for name, value in item.non_tensor_batch.items()}
        if item.batch is not None:
            row |= {name: plain(value) for name, value in item.batch.items()}
        rows.append(row)
    return rows
