"""The rows of a file, and the order in which a run uses them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON lines file, each with the number of its line.

    Raises:
        ValueError: there is no such file, or a line is not a JSON object. The message has file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: a string may contain U+2028
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: expected an object with fields, got {type(row).__name__}")
        yield number, row


class RowOrder:
    """The order of examples. Each epoch has another order, a function of (seed, epoch).

    Its whole state is ``position``.

    >>> order = RowOrder(3, seed=0, shuffle=True)
    >>> sorted(order.take(3)), order.position
    ([0, 1, 2], 3)
    """

    def __init__(self, examples: int, *, seed: int, shuffle: bool) -> None:
        self.examples = examples
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0

    def take(self, count: int) -> list[int]:
        taken = [self._at(self.position + i) for i in range(count)]
        self.position += count
        return taken

    def _at(self, position: int) -> int:
        epoch, index = divmod(position, self.examples)
        return int(self._permutation(epoch)[index]) if self.shuffle else index

    def _permutation(self, epoch: int) -> Any:
        if getattr(self, "_cached", (None,))[0] != epoch:
            order = np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(self.examples)
            self._cached = (epoch, order)
        return self._cached[1]
