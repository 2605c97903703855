"""Loggers of a user, named by import path in the tests' configs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Lines:
    """Writes what it gets, a line for each call."""

    def __init__(self, run: Path, settings: dict[str, Any]) -> None:
        self.file = (run / "lines.jsonl").open("w")
        self.write(settings=settings)

    def write(self, **line: Any) -> None:
        self.file.write(json.dumps(line) + "\n")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.write(metrics=dict(metrics), step=step)

    def close(self) -> None:
        self.write(closed=True)
        self.file.close()


class Tables(Lines):
    def log_table(self, table: dict[str, list[Any]], step: int) -> None:
        self.write(table=table, step=step)
