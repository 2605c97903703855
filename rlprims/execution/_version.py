"""The version of the sampler's weights in a checkpoint, so that samples that wait there keep their age."""

import json
from pathlib import Path

_FILE = "weights_version.json"


def save_version(directory: Path, version: int) -> None:
    (directory / _FILE).write_text(json.dumps(version))


def load_version(directory: Path) -> int:
    return int(json.loads((directory / _FILE).read_text()))
