"""docs/lab.md and the notebooks do what they say."""

import doctest
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def test_examples_of_the_page():
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, tried = doctest.testfile(str(DOCS / "lab.md"), module_relative=False, optionflags=options)
    assert tried >= 10
    assert failed == 0


def test_the_notebooks_run_and_say_what_is_stored():
    command = [sys.executable, DOCS / "notebooks" / "run.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=DOCS.parent)
    assert done.returncode == 0, done.stderr


def test_the_notebooks_are_there_and_small():
    assert len(NOTEBOOKS) >= 4
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 1_000_000
