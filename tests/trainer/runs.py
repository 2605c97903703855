"""Reading a run back."""

import json
from pathlib import Path
from typing import Any


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The lines of a run without what a clock measured."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]
