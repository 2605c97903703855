"""The console of the command line: rich, or plain lines if the extra ``train`` is not installed."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_PIPED_WIDTH = 160
"""The width of a file or a pipe, so that each row of a table is one line."""


class PlainConsole:
    """The methods of rich's Console that commands need if rich is not installed."""

    def __init__(self, *, stderr: bool = False) -> None:
        self.stderr = stderr

    def print(self, *parts: object, **style: object) -> None:
        stream = sys.stderr if self.stderr else sys.stdout
        stream.write(" ".join(map(str, parts)) + "\n")


def open_console(*, stderr: bool = False) -> Any:
    """A console for standard output, or for standard error."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return PlainConsole(stderr=stderr)
    stream = sys.stderr if stderr else sys.stdout
    known = stream.isatty() or "COLUMNS" in os.environ
    # Without markup, because rich would read [a.name] in a message or a path as a style and not print it.
    return Console(stderr=stderr, width=None if known else _PIPED_WIDTH, markup=False)


def make_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", styles: Mapping[str, str] | None = None
) -> Any:
    """A table for :func:`open_console`; ``styles`` maps the text of a cell to a style of rich."""
    try:
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:
        return plain_table(columns, rows, title=title)
    table = Table(*columns, title=title or None)
    for row in rows:
        table.add_row(*(Text(cell, style=(styles or {}).get(cell, "")) for cell in row))
    return table


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> str:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    aligned = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (columns, *rows))
    return "\n".join([*filter(None, [title]), *("  ".join(row).rstrip() for row in aligned)])
