"""Loggers of a user, named by import path in the tests' configs."""

import json
import os
from pathlib import Path
from typing import Any


class Lines:
    """Writes what it gets, a line for each call."""

    def __init__(self, run: Path, settings: dict[str, Any]) -> None:
        self.file = (run / "lines.jsonl").open("w")
        self.write(settings=settings)

    def write(self, **line: Any) -> None:
        self.file.write(json.dumps(line) + "\n")

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.write(metrics=dict(metrics), step=step)

    def close(self) -> None:
        self.write(closed=True)
        self.file.close()


class Tables(Lines):
    def log_table(self, table: dict[str, list[Any]], step: int) -> None:
        self.write(table=table, step=step)


class Comet:
    """That of docs/trainer.md, without a server."""

    def __init__(self, run: Path, settings: dict[str, Any]) -> None:
        import comet_ml

        self.session = comet_ml.OfflineExperiment(offline_directory=str(run / "comet"))
        self.session.log_parameters(settings)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.session.log_metrics(metrics, step=step)

    def log_table(self, table: dict[str, list[Any]], step: int) -> None:
        rows = [list(row) for row in zip(*table.values(), strict=True)]
        self.session.log_table(f"samples_{step:06d}.csv", rows, headers=list(table))

    def close(self) -> None:
        self.session.end()


class Unblocks:
    """Removes the file that ``UNBLOCKED`` names, which is in the way of copies, when the run has counted one."""

    def __init__(self, run: Path, settings: dict[str, Any]) -> None:
        self.file = Path(os.environ["UNBLOCKED"])

    def log(self, metrics: dict[str, float], step: int) -> None:
        if metrics.get("train/failed_copies") and self.file.is_file():
            self.file.unlink()

    def close(self) -> None:
        pass
