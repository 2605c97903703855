"""Several algorithms on the same rollouts: per-token advantages, losses and pushes, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from rlprims.algorithms import Algorithm, diff
from rlprims.lab._display import Table
from rlprims.lab._simulate import Batch, simulate


@dataclass(frozen=True, repr=False)
class Comparison:
    """The differences between algorithms on the same rollouts.

    Attributes:
        settings: the settings that differ from the first algorithm's.
        responses: the columns ``step``, ``group_ids``, ``scores`` and ``answer`` if the batch has them; and per
            algorithm ``push``, the sum of the tokens' gradients, and ``share``, their part of all |gradient|.
        tokens: advantage, gradient and cause per token and algorithm, as in :func:`simulate`; ``change`` is the
            gradient minus the first algorithm's.
    """

    settings: Table
    responses: Table
    tokens: Table

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, (self.settings, self.responses, self.tokens)))

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in (self.settings, self.responses, self.tokens))


def compare(algorithms: Sequence[Algorithm], batch: Batch, *, seed: int = 0) -> Comparison:
    """Compare algorithms on the same rollouts.

    Each algorithm is compared with the first one. Columns are named ``<what> <algorithm>``; equal names are numbered.

    Raises:
        ValueError: fewer than two algorithms, or a batch without data that one of them needs.
    """
    if len(algorithms) < 2:
        raise ValueError(f"algorithms has {len(algorithms)} entries, expected at least two")
    names = _names(algorithms)
    tables = {name: simulate(algorithm, batch, seed=seed) for name, algorithm in zip(names, algorithms, strict=True)}
    first = names[0]
    place = {key: tables[first][key] for key in ("row", "position", "token") if key in tables[first].columns}
    gradients = {name: table["gradient"] for name, table in tables.items()}
    tokens = place | {f"advantage {name}": table["advantage"] for name, table in tables.items()}
    tokens |= {f"gradient {name}": column for name, column in gradients.items()}
    for name in names[1:]:
        tokens[f"change {name}"] = [b - a for a, b in zip(gradients[first], gradients[name], strict=True)]
    tokens |= {f"cause {name}": table["cause"] for name, table in tables.items()}
    shaded = tuple(name for name in tokens if name.startswith(("gradient ", "change ")))
    responses = _responses(place["row"], gradients, batch)
    return Comparison(_settings(names, algorithms), responses, Table(tokens, "tokens", coloured=shaded))


def _names(algorithms: Sequence[Algorithm]) -> list[str]:
    names: list[str] = []
    for algorithm in algorithms:
        before = sum(name.split(" #")[0] == algorithm.name for name in names)
        names.append(f"{algorithm.name} #{before + 1}" if before else algorithm.name)
    return names


def _settings(names: Sequence[str], algorithms: Sequence[Algorithm]) -> Table:
    """A row per setting and algorithm, except the first algorithm."""
    columns: dict[str, list[Any]] = {"setting": [], "algorithm": [], "value": [], names[0]: []}
    for name, other in zip(names[1:], algorithms[1:], strict=True):
        for setting, (mine, theirs) in diff(algorithms[0], other).items():
            if setting != "name":
                for column, value in zip(columns.values(), (setting, name, str(theirs), str(mine)), strict=True):
                    column.append(value)
    return Table(columns, "settings that differ")


_OF_A_RESPONSE = {"step": "step", "group": "group_ids", "score": "scores", "answer": "answer"}
"""Columns of the table, and their names in a batch."""


def _responses(rows: Sequence[int], gradients: dict[str, list[float]], batch: Batch) -> Table:
    """Each response with its columns of the batch, the sum of its gradients, and its share of all gradients."""
    present = sorted(set(rows))
    columns: dict[str, list[Any]] = {"row": present}
    for name, key in _OF_A_RESPONSE.items():
        if key in batch:
            column = batch[key].tolist() if isinstance(batch[key], Tensor | np.ndarray) else batch[key]
            columns[name] = [column[row] for row in present]
    columns["tokens"] = [rows.count(row) for row in present]
    for name, gradient in gradients.items():
        whole = sum(map(abs, gradient))
        own = [[g for r, g in zip(rows, gradient, strict=True) if r == row] for row in present]
        columns[f"push {name}"] = [sum(part) for part in own]
        columns[f"share {name}"] = [sum(map(abs, part)) / whole if whole else 0.0 for part in own]
    return Table(columns, "responses", coloured=tuple(f"push {name}" for name in gradients))
