"""The same rows as text, as JSON, and as Markdown made from the JSON."""

import json
from collections.abc import Iterator
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
PICTURE, ALL = "ratios.png", "rows.md"
SUMMARY = ("case", "ms", "fastest peer", "ms", "ratio", "verl ms", "ratio", "floor ms", "over floor", "error", "peer's")
INTRODUCTION = """\
# Benchmarks

Made by `make bench`; do not edit. The page is written from the numbers in `{json}`.

Times are CPU milliseconds of one thread: the median of rounds in which all functions of a case run in turn in
one process.

- **ratio**: a peer's time over that of rlprims, the median of the ratios of the rounds. Above 1 rlprims is
  faster.
- **error**: max |result − oracle| / max |oracle| against float64, for rlprims and the fastest peer, in the same
  run. For the filter and the rewards it is the share of wrong rows; for batching the work or the number of
  parts beyond the minimum, as a share.
- **floor**: a copy of as many bytes as the case must read and write, between existing buffers; with a head,
  only the matrix products.
- A case with "formulas" runs without kernels (`RLPRIMS_KERNELS=0`); a case with "compiled" runs the same lines
  under `torch.compile`.

[Every row, with quartiles and peak memory]({all})
· [speed and memory: targets and measurements](targets.md) · [a step of the trainer beside TRL's](trainer_step.md)
· [a step on SmolLM2-135M beside TRL's](smollm_step.md) · [ranks beside one process](ranks.md)
· [engines of a cluster](execution.md)

![Time of the fastest peer over ours, by case, on a log axis]({picture})

{machine} · {versions} · {date}

One thread of this machine at its best: {rates}.
"""
ROWS = """\
# Every row of the benchmarks

Made by `make bench` from `{json}`; do not edit. [The report](README.md) explains the columns. **peak** is the
increase of resident memory, exact to about one array.
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
    out.with_name("README.md").write_text(summary(result, out.name), encoding="utf-8")
    out.with_name(ALL).write_text(every_row(result, out.name), encoding="utf-8")


def summary(result: dict[str, Any], name: str) -> str:
    """A line for each case: ours, the fastest peer, verl, the floor."""
    machine = result["machine"]
    page = INTRODUCTION.format(
        json=name,
        all=ALL,
        picture=PICTURE,
        machine=f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}, Python {machine['python']}",
        versions=", ".join(f"{package} {version}" for package, version in result["versions"].items()),
        date=result["date"],
        rates=", ".join(f"{what} {rate:.3g}" for what, rate in result["rates"].items()),
    )
    for title, rows in _families(result):
        page += f"\n## {title}\n\n| {' | '.join(SUMMARY)} |\n|---|---:|---|{'---:|' * (len(SUMMARY) - 3)}\n"
        for case in dict.fromkeys(row["case"] for row in rows):
            for cells in _compared([row for row in rows if row["case"] == case]):
                page += f"| {' | '.join(cells)} |\n"
    return page


def every_row(result: dict[str, Any], name: str) -> str:
    page = ROWS.format(json=name)
    for title, rows in _families(result):
        page += f"\n## {title}\n\n| {' | '.join(HEAD[1:])} |\n|---|---|{'---:|' * (len(HEAD) - 3)}\n"
        page += "".join(f"| {' | '.join(_cells(row))} |\n" for row in rows)
    return page


def _families(result: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    found = {family: [row for row in result["rows"] if row["family"] == family] for family in FAMILIES}
    return [(FAMILIES[family], rows) for family, rows in found.items() if rows]


def _compared(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Of one case: ours, and each variant of ours, beside the same peers and floor."""
    fastest = next(iter(_picture.fastest_peers(rows)), None)
    verl = next((row for row in rows if row["who"].split()[0].rstrip(",") == "verl"), None)
    floor = next((row for row in rows if row["who"] in _picture.FLOORS), None)
    for ours in rows:
        who, _, variant = ours["who"].partition(", ")
        if who != "rlprims":
            continue

        def ratio(row: dict[str, Any] | None, ours: dict[str, Any] = ours) -> float | None:
            return None if row is None else row["ratio"] / ours["ratio"]

        over = ratio(floor)
        yield (
            f"{ours['case']}, {variant}" if variant else ours["case"],
            _number(ours["milliseconds"]),
            "" if fastest is None else fastest["who"],
            "" if fastest is None else _number(fastest["milliseconds"]),
            _marked(ratio(fastest)),
            "" if verl is None else _number(verl["milliseconds"]),
            _marked(ratio(verl)),
            "" if floor is None else _number(floor["milliseconds"]),
            "" if over is None else _number(1 / over),
            _error(ours["error"]),
            "" if fastest is None else _error(fastest["error"]),
        )


def _marked(ratio: float | None) -> str:
    """Bold where we are slower."""
    return "" if ratio is None else _number(ratio) if ratio >= 1 else f"**{_number(ratio)}**"


def _error(error: float | None) -> str:
    return "" if error is None else "0" if error == 0 else f"{error:.1e}"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    low, high = row["spread"]
    ours = row["who"] == "rlprims"
    return (
        row["case"],
        row["who"],
        _number(row["milliseconds"]),
        "" if ours else _number(row["ratio"]),
        "" if ours else f"{_number(low)} to {_number(high)}",
        _error(row["error"]),
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
