"""The rows of files, those that cannot be used, and the order in which a run uses the rest."""

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from pydantic import Field

from rlprims.runs.config import Section
from rlprims.runs.files import files_of, values_of
from rlprims.turns.tokens import Chat


class RowsConfig(Section):
    """Where rows are, and how they become texts: for all kinds of runs."""

    train: Path
    eval: Path | None = Field(default=None, description="held-out rows; null: none")
    layout: str | None = Field(
        default=None, description="name of the fields' layout, such as verl; null: recognized by the first row"
    )
    tools: str = Field(default="tools", description="field with the schemas of tools, for the chat template")
    system: str | None = Field(default=None, description="system message of the chat template")
    template_arguments: dict[str, Any] = Field(
        default={}, description="for the chat template, such as {enable_thinking: false}"
    )
    time: datetime | None = Field(
        default=None, description="time for chat templates that write the date; null: the time when the run begins"
    )
    max_prompt_length: int | None = Field(default=None, ge=1, description="tokens; null: limited by the window")
    on_bad_row: Literal["stop", "skip"] = Field(
        default="stop", description="rows that cannot be used: stop before the run begins, or leave them out"
    )
    shuffle: bool = Field(default=True, description="every epoch has its own order")

    def chat(self, tokenizer: Any) -> Chat:
        """The tokenizer's chat template with the arguments of the settings."""
        arguments, time = dict(self.template_arguments), self.time
        if time is not None and "strftime_now" in str(getattr(tokenizer, "chat_template", None)):
            arguments.setdefault("strftime_now", time.strftime)
        return Chat(tokenizer, arguments)


def with_time(config: Any) -> Any:
    """The settings with a time, which the run keeps: a resume on another day renders the same texts."""
    if config.data.time is not None:
        return config
    now = datetime.now().replace(microsecond=0)
    return config.model_copy(update={"data": config.data.model_copy(update={"time": now})})


class BadRows:
    """Rows that cannot be used, counted by their cause."""

    def __init__(self, path: Path, on_bad_row: Literal["stop", "skip"] = "stop") -> None:
        self.path, self.skips = path, on_bad_row == "skip"
        self.found: dict[str, list[str]] = {}
        """By cause the message of the first row, and the places of all."""

    def add(self, place: str, error: ValueError) -> None:
        cause = re.sub(r"\d+", "N", re.split(r"[:;]|, got | at ", str(error))[0])
        self.found.setdefault(cause, [f"{place}: {error}"]).append(place)

    @property
    def count(self) -> int:
        return sum(len(places) - 1 for places in self.found.values())

    def check(self) -> None:
        """Raise a ValueError if there are bad rows, and they are not skipped."""
        if self.found and not self.skips:
            raise ValueError(self.text())

    def text(self) -> str:
        """A line for each cause, with the first row and the places of others."""
        lines = [first + _others(places) for first, *places in self.found.values()]
        if self.count > 1 and not self.skips:
            lines.append(f"{self.path}: {self.count} rows cannot be used: mend them, or set data.on_bad_row: skip")
        return "\n".join(lines)


def _others(places: list[str]) -> str:
    numbers = [place.rpartition(":")[2] for place in places[1:6]]
    more = ", ..." if len(places) > 6 else ""
    return f" (and {len(places) - 1} more: {', '.join(numbers)}{more})" if numbers else ""


def read_rows(path: Path, bad: BadRows) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file, or of the files that match, each with its place: file and number.

    Raises:
        ValueError: there is no such file.
    """
    for file in files_of(path):
        for number, value in enumerate(values_of(file), 1):
            place = f"{file}:{number}"
            if isinstance(value, ValueError):
                bad.add(place, value)
            elif isinstance(value, dict):
                yield place, value
            elif value is not None:  # an empty line
                got = type(value).__name__
                bad.add(place, ValueError(f"expected an object with fields, got {got}"))


class _Rows(Protocol):
    @property
    def bad(self) -> BadRows: ...
    @property
    def layout(self) -> str | None: ...


def report(rows: _Rows, path: Path, console: Any) -> None:
    """Print the layout that was recognized, and the rows that were left out."""
    if rows.layout is not None:
        console.print(f"{path}: layout {rows.layout}", highlight=False, soft_wrap=True)
    if rows.bad.count:
        console.print(
            f"{path}: {rows.bad.count} rows were left out\n{rows.bad.text()}",
            style="yellow",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


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
