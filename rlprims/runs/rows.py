"""The rows of files, those that cannot be used, and the order in which a run uses the rest."""

import base64
import json
import os
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, TypeVar, overload

import numpy as np
from pydantic import Field, field_validator

from rlprims.runs.config import Place, Section
from rlprims.runs.files import files_of, values_of
from rlprims.runs.layouts import MISSING, value_at
from rlprims.turns.tokens import Chat

Row = TypeVar("Row")
_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
"""In a chat template, whose arguments transformers 5.24 makes plain: no function reaches it."""


class RowsConfig(Section):
    """Where rows are, and how they become texts: for all kinds of runs."""

    train: Place = Field(description="file of rows, or several by wildcards; or a url")
    eval: Place | None = Field(default=None, description="file of held-out rows; null: no evaluation")
    layout: str | None = Field(
        default=None, description="name of the fields' layout, such as verl or trl; null: recognized by the first row"
    )
    images: str | None = Field(default="images", description="field that holds one image or a list; null: none")
    images_from: Literal["files", "http"] = Field(default="files", description="http: urls of images are fetched")
    tools: str = Field(default="tools", description="field with the schemas of tools, for the chat template")
    system: str | None = Field(default=None, description="system message of the chat template")
    template_arguments: dict[str, Any] = Field(
        default={}, description="for the chat template, such as {enable_thinking: false}"
    )
    time: datetime | None = Field(
        default=None,
        description="time for chat templates that write the date; null: the time when the run begins, which a resume "
        "keeps",
    )
    max_prompt_length: int | None = Field(
        default=None, ge=1, description="tokens; null: limited by the window (rlprims train: minus the response limit)"
    )
    on_bad_row: Literal["stop", "skip"] = Field(
        default="stop", description="rows that cannot be used: stop before the run begins, or skip them"
    )
    shuffle: bool = Field(default=True, description="every epoch has its own order")

    @field_validator("template", check_fields=False)  # of a subclass, whose default is the field alone
    @classmethod
    def _has_its_field(cls, template: str) -> str:
        field = cls.model_fields["template"].default
        if template != "chat" and field not in template:
            raise ValueError(f"expected text with {field} in it, or chat")
        return template

    def images_in(self, row: Mapping[str, Any]) -> Any:
        """The field of images of a row; None if it has none, and [] if there are none in it."""
        column = MISSING if self.images is None else value_at(row, self.images)
        return None if column is MISSING else column or []

    def chat(self, tokenizer: Any) -> Chat:
        """The tokenizer's chat template with the arguments of the settings."""
        arguments, time = dict(self.template_arguments), self.time
        template = arguments.get("chat_template", getattr(tokenizer, "chat_template", None))
        if time is not None and isinstance(template, str) and "strftime_now" in template:
            arguments["chat_template"] = _NOW.sub(lambda now: repr(time.strftime(now[2])), template)
        return Chat(tokenizer, arguments)


def with_time(config: Any) -> Any:
    """The settings with a time, which the run keeps: a resume on another day renders the same texts."""
    if config.data.time is not None:
        return config
    now = datetime.now().replace(microsecond=0)
    return config.model_copy(update={"data": config.data.model_copy(update={"time": now})})


class BadRows:
    """Rows that cannot be used, counted by their cause."""

    def __init__(self, path: Path | str, on_bad_row: Literal["stop", "skip"] = "stop") -> None:
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
        lines = []
        for first, *places in self.found.values():
            numbers = ", ".join(place.rpartition(":")[2] for place in places[1:6]) + ", ..." * (len(places) > 6)
            lines.append(first + (f" (and {len(places) - 1} more: {numbers})" if numbers else ""))
        if self.count > 1 and not self.skips:
            lines.append(f"{self.path}: {self.count} rows cannot be used: mend them, or set data.on_bad_row: skip")
        return "\n".join(lines)


def read_rows(path: Path | str, bad: BadRows) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file, or of the files that match, each with its place: file and number."""
    for file in files_of(path):
        for number, value in enumerate(values_of(file), 1):
            place = f"{file}:{number}"
            if isinstance(value, ValueError):
                bad.add(place, value)
            elif isinstance(value, dict):
                yield place, value
            elif value is not None:  # an empty line
                bad.add(place, ValueError(f"expected an object with fields, got {type(value).__name__}"))


class OnDisk(Sequence[Row]):
    """Rows in a temporary file: memory holds 8 bytes for each. ``decode`` makes a row of its JSON values.

    A row that JSON would change, such as one with a date, stays in memory. Of bytes ``decode`` gets base64.
    """

    def __init__(self, decode: Callable[[Any], Row]) -> None:
        self.decode, self._file = decode, TemporaryFile(buffering=0)  # noqa: SIM115 - open as long as the rows
        self._ends, self._in_memory = array("Q", [0]), dict[int, Row]()

    def append(self, row: Row) -> None:
        try:
            text = json.dumps(row, default=lambda value: base64.b64encode(value).decode())
            is_kept = self.decode(json.loads(text)) == row
        except (TypeError, ValueError):
            is_kept = False
        if not is_kept:
            self._in_memory[len(self)], text = row, ""
        self._ends.append(self._ends[-1] + self._file.write(text.encode()))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        if index in self._in_memory:
            return self._in_memory[index]
        begin, end = self._ends[index], self._ends[index + 1]
        return self.decode(json.loads(os.pread(self._file.fileno(), end - begin, begin)))


def have_images(model: Any, *files: Any) -> bool:
    """Whether rows or episodes have images; an error if ``model.vision`` is none."""
    found = any(rows.has_images for rows in files if rows is not None)
    if found and model.vision == "none":
        fix = "set model.vision: frozen, or data.images: null"
        raise ValueError(f"model.vision: none reads texts, and rows or episodes have images: {fix}")
    return found


def report(rows: Any, path: Path | str, console: Any) -> None:
    """Print the layout that was recognized, and the rows that were left out."""
    if rows.layout is not None:
        console.print(f"{path}: layout {rows.layout}", highlight=False, soft_wrap=True)
    if rows.bad.count:
        text = f"{path}: {rows.bad.count} rows were left out\n{rows.bad.text()}"
        console.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)


class RowOrder:
    """The order of examples, for each epoch a function of (seed, epoch). Its whole state is ``position``.

    >>> order = RowOrder(3, seed=0, shuffle=True)
    >>> sorted(order.take(3)), order.position
    ([0, 1, 2], 3)
    """

    def __init__(self, examples: int, *, seed: int, shuffle: bool) -> None:
        self.examples, self.seed, self.shuffle = examples, seed, shuffle
        self.position = 0
        self._epoch: tuple[int, Any] = (-1, range(examples))
        """The number of an epoch, and its order."""

    def take(self, count: int) -> list[int]:
        taken = []
        for epoch, index in (divmod(self.position + i, self.examples) for i in range(count)):
            if self.shuffle and self._epoch[0] != epoch:
                bits = np.random.Philox(key=[self.seed, epoch])
                self._epoch = epoch, np.random.Generator(bits).permutation(self.examples)
            taken.append(int(self._epoch[1][index]))
        self.position += count
        return taken
