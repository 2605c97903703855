"""Tables for notebooks, which are plain text in a terminal."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from rlprims.reports._visible import visible

_SHOWN = 60
"""The number of rows that are printed. All rows can be read by column name."""

_LONGEST = 80
"""The number of characters of a cell that are printed."""

_STYLE = (
    "<style>.rlprims-table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}"
    ".rlprims-table caption{text-align:left;padding:4px 0;font-weight:600;color:inherit}"
    ".rlprims-table th,.rlprims-table td{padding:2px 10px;border-bottom:1px solid rgba(128,128,128,.3)}"
    "</style>"
)


@dataclass(frozen=True, repr=False)
class Table:
    """Columns of equal length by name. ``pandas.DataFrame(table.columns)`` converts it.

    Attributes:
        columns: name to plain Python values.
        title: the title of the table.
        notes: numbers of the whole table, by name.
        coloured: columns whose cells are shaded by sign and size, relative to the column's largest.

    >>> table = Table({"row": [0, 1], "push": [0.25, -0.5]}, title="two tokens")
    >>> table
    two tokens
    row   push
      0   0.25
      1   -0.5
    >>> table.where(row=1)["push"]
    [-0.5]
    """

    columns: Mapping[str, list[Any]]
    title: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)
    coloured: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns have {lengths} entries, expected the same number in each")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self.columns:
            raise ValueError(f"no column {name!r}, expected one of {list(self.columns)}")
        return self.columns[name]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Each row as a dict."""
        return (dict(zip(self.columns, values, strict=True)) for values in zip(*self.columns.values(), strict=True))

    def where(self, **values: Any) -> "Table":
        """The rows in which the named columns have these values. Notes are still those of the whole table."""
        wanted = [all(self[name][i] == value for name, value in values.items()) for i in range(len(self))]
        kept = {n: [x for x, keep in zip(c, wanted, strict=True) if keep] for n, c in self.columns.items()}
        return Table(kept, self.title, self.notes, self.coloured)

    @property
    def _caption(self) -> str:
        notes = ", ".join(f"{name} {_text(value)}" for name, value in self.notes.items())
        return " · ".join(filter(None, [visible(self.title), visible(notes)]))

    @property
    def _more(self) -> str:
        return f"… {len(self) - _SHOWN} more rows" if len(self) > _SHOWN else ""

    def __repr__(self) -> str:
        cells = [[name, *map(_text, column[:_SHOWN])] for name, column in self.columns.items()]
        aligned = ([cell.rjust(max(map(len, column))) for cell in column] for column in cells)
        lines = ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]
        return "\n".join(filter(None, [self._caption, *lines, self._more]))

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align:right'>{escape(name)}</th>" for name in self.columns)
        largest = {name: max(map(abs, self[name]), default=0.0) for name in self.coloured}
        body = []
        for row in list(self.rows())[:_SHOWN]:
            cells = (
                f"<td style='text-align:right{_shade(value, largest.get(name, 0.0))}'>{escape(_text(value))}</td>"
                for name, value in row.items()
            )
            body.append(f"<tr>{''.join(cells)}</tr>")
        caption = f"<caption>{escape(self._caption)}</caption>" if self._caption else ""
        more = f"<p>{self._more}</p>" if self._more else ""
        inner = f"{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
        return f"{_STYLE}<table class='rlprims-table'>{inner}</table>{more}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value + 0.0:.4g}"  # −0 is 0
    text = visible(str(value).replace("\n", "↵"))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _shade(value: Any, largest: float) -> str:
    """Green for a positive value, red for a negative one, readable on light and dark pages."""
    if not largest or not isinstance(value, int | float) or not value:
        return ""
    colour = "0,165,80" if value > 0 else "225,50,45"
    return f";background:rgba({colour},{0.55 * abs(value) / largest:.3f})"
