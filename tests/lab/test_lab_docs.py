"""The notebooks do what they say."""

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
def test_the_notebooks_run_and_say_what_is_stored():
    command = [sys.executable, DOCS / "notebooks" / "run.py", "--check", *(path.name for path in NOTEBOOKS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=DOCS.parent)
    assert done.returncode == 0, done.stderr


def test_the_notebooks_are_there_and_small():
    assert len(NOTEBOOKS) >= 6
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 1_000_000
