"""The same rows as text, as JSON, and as Markdown made from the JSON."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import _picture
from benchmarks._harness import Row

HEAD = ("family", "case", "who", "ms", "ratio", "quartiles", "error", "peak MiB")
FAMILIES = {
    "gae": "GAE, whitened, with returns",
    "returns": "Discounted returns, V-trace and REINFORCE++",
    "group": "Group-relative advantages, from labels",
    "estimators": "Other estimators, from labels to tokens",
    "filter": "DAPO's group filter, from labels",
    "loss": "Clipped policy loss, forward and backward, with metrics",
    "losses": "Other losses, forward and backward (verl's with their metrics)",
    "logits": "Logits to log-probs, entropies, and the gradient of the log-probs (train)",
    "head": "LM head to log-probs and entropy (score), and to a clipped policy loss with its gradient (train)",
    "batch": "DataProto, 4096 x 4096 tokens in three columns (320 MiB), four object columns",
    "batching": "Rows to ranks (balance), to packs and to micro-batches of 8192 tokens",
    "rewards": "Real answers scored by rule",
}
PICTURE = "ratios.png"
INTRODUCTION = """\
# Benchmarks

Made by `make bench`; the numbers are in `{json}`. Do not edit: this page is written from it.

CPU milliseconds of one thread: median of rounds in which all functions of a case take turns in one process.
**ratio** is that row's time over the time of `rlprims`, the median of the per-round ratios: above 1 we are faster.
**error** is max |result − oracle| / max |oracle| against float64, in the same run (for the filter and the rewards: the
share of wrong rows; for batching: by how much the work or the parts exceed the least there can be, as a share).
**copy** moves as many bytes as the case must read and write, between buffers that exist. **peak** is how far resident
memory rose, good to about one array. `make bench-gate` fails where a short run's ratio is below the
floor that `benchmarks/floors.json` has for it, three fifths of one that was measured.

[What was aimed at, what was reached, and why not](targets.md) · [a step of the trainer beside TRL's](trainer_step.md)

![Time of the fastest peer over ours, by case, on a log axis]({picture})

{machine} · {versions} · {date}
"""


def header() -> str:
    return _line(HEAD)


def text(row: Row) -> str:
    return _line((row.family, *_cells(asdict(row))))


def write(rows: list[Row], facts: dict[str, Any], out: Path) -> None:
    """``out`` and a README.md beside it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    result = {**facts, "rows": [asdict(row) for row in rows]}
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    result = json.loads(out.read_text(encoding="utf-8"))
    _picture.draw(result["rows"], FAMILIES, out.with_name(PICTURE))
    out.with_name("README.md").write_text(markdown(result, out.name), encoding="utf-8")


def markdown(result: dict[str, Any], name: str) -> str:
    machine = result["machine"]
    page = INTRODUCTION.format(
        json=name,
        picture=PICTURE,
        machine=f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}, Python {machine['python']}",
        versions=", ".join(f"{package} {version}" for package, version in result["versions"].items()),
        date=result["date"],
    )
    for family, title in FAMILIES.items():
        rows = [row for row in result["rows"] if row["family"] == family]
        if rows:
            page += f"\n## {title}\n\n| {' | '.join(HEAD[1:])} |\n|---|---|{'---:|' * (len(HEAD) - 3)}\n"
            page += "".join(f"| {' | '.join(_cells(row))} |\n" for row in rows)
    return page


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    low, high = row["spread"]
    ours = row["who"] == "rlprims"
    return (
        row["case"],
        row["who"],
        _number(row["milliseconds"]),
        "" if ours else _number(row["ratio"]),
        "" if ours else f"{_number(low)} to {_number(high)}",
        "" if row["error"] is None else "0" if row["error"] == 0 else f"{row['error']:.1e}",
        "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}",
    )


def _number(x: float) -> str:
    return f"{x:.3g}" if x < 100 else f"{x:.0f}"


def _line(cells: tuple[str, ...]) -> str:
    widths = (7, 28, 21, 8, 7, 16, 9, 8)
    return "  ".join(
        cell.ljust(width) if i < 3 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()
