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
PICTURE, ALL = "ratios.png", "rows.md"
SUMMARY = ("case", "ms", "fastest peer", "ratio", "verl's ratio", "over floor", "error", "peer's")
STORED = Path(__file__).parents[1] / "docs" / "benchmarks" / "results.json"
INTRODUCTION = """\
# Benchmarks

Measured by `make bench` at {commit}; made from `{json}`, do not edit.

Times are CPU milliseconds of one thread: the median of rounds in which all functions of a case run in turn.

- **ratio**: a peer's time over ours, the median over the rounds. Bold: rlprims is slower.
- **error**: max |result − oracle| / max |oracle| against float64, ours and the fastest peer's. For the filter and the
  rewards it is the share of wrong rows; for batching, the work or the number of parts beyond the minimum.
- **over floor**: our time over that of a copy of the bytes that the case must read and write; with a head, over that of
  its matrix products.

Variants of ours, all peers, quartiles and peak memory: [every row]({all}). Other measurements: [targets](targets.md) ·
[a step of the trainer](trainer_step.md) · [a step on SmolLM2-135M](smollm_step.md) · [ranks](ranks.md) · [engines of a
cluster](execution.md) · [long runs](long_run.md) · [a GPU](gpu.md) · [what audit names](audit.md)

![Time of the fastest peer over ours, by case, on a log axis]({picture})

{machine} · {versions} · {date}

One thread of this machine at its best: {rates}.
"""
ROWS = """\
# Every row of the benchmarks

Made from `{json}`. Measured by `make bench` at {commit}.

[The report](README.md) explains the columns. **peak** is the increase of resident memory, exact to about one array.
Rows with "formulas" run without kernels (`RLPRIMS_KERNELS=0`); rows with "compiled" run the same lines under
`torch.compile`.
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


def summary(result: dict[str, Any], name: str) -> str:
    """A line for each case: ours, the fastest peer, verl, the floor."""
    machine = result["machine"]
    page = INTRODUCTION.format(
        json=name,
        commit=machine["commit"],
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
            page += f"| {' | '.join(_compared([row for row in rows if row['case'] == case]))} |\n"
    return page


def every_row() -> str:
    """The page of all stored rows, which the site makes when it is built."""
    result = json.loads(STORED.read_text(encoding="utf-8"))
    page = ROWS.format(json=STORED.name, commit=result["machine"]["commit"])
    for title, rows in _families(result):
        page += f"\n## {title}\n\n| {' | '.join(HEAD[1:])} |\n|---|---|{'---:|' * (len(HEAD) - 3)}\n"
        page += "".join(f"| {' | '.join(_cells(row))} |\n" for row in rows)
    return page


def _families(result: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    found = {family: [row for row in result["rows"] if row["family"] == family] for family in FAMILIES}
    return [(FAMILIES[family], rows) for family, rows in found.items() if rows]


def _compared(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Of one case: ours beside the fastest peer, verl and the floor."""
    ours = next(row for row in rows if row["who"] == "rlprims")
    fastest = next(iter(_picture.fastest_peers(rows)), None)
    verl = next((row for row in rows if row["who"].split()[0].rstrip(",") == "verl"), None)
    floor = next((row for row in rows if row["who"] in _picture.FLOORS), None)
    return (
        ours["case"],
        _number(ours["milliseconds"]),
        "" if fastest is None else fastest["who"],
        "" if fastest is None else _marked(fastest["ratio"]),
        "" if verl is None else _marked(verl["ratio"]),
        "" if floor is None else _number(1 / floor["ratio"]),
        _error(ours["error"]),
        "" if fastest is None else _error(fastest["error"]),
    )


def _marked(ratio: float) -> str:
    """Bold where we are slower."""
    return _number(ratio) if ratio >= 1 else f"**{_number(ratio)}**"


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
