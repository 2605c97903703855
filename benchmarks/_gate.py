"""The gate that CI can run: is any median ratio below the floor that ``floors.json`` has for its case and peer?

A floor is three fifths of a measured ratio: on a shared machine the medians of short runs differ by up to a third.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks._harness import Row

FLOORS = Path(__file__).with_name("floors.json")
SLACK = 0.6


def failures(rows: Iterable[Row]) -> list[str]:
    """A line for each row that is below its floor, and for each floor that no row answers."""
    floors: dict[str, float] = json.loads(FLOORS.read_text(encoding="utf-8"))
    ratios = {_key(row): row.ratio for row in rows}
    return [f"{key}: not measured, floor {floor:.3g}" for key, floor in floors.items() if key not in ratios] + [
        f"{key}: ratio {ratios[key]:.3g}, floor {floor:.3g}"
        for key, floor in floors.items()
        if key in ratios and not ratios[key] >= floor
    ]


def write(rows: Iterable[Row]) -> None:
    """The floors from a run; only of peers."""
    floors = {_key(row): round(SLACK * row.ratio, 2) for row in rows if not _ours(row.who)}
    FLOORS.write_text(json.dumps(floors, indent=1) + "\n", encoding="utf-8")


def _ours(who: str) -> bool:
    return who == "copy" or who.startswith("rlprims")


def _key(row: Row) -> str:
    return f"{row.family}, {row.case}, {row.who}"
