"""The notebooks do what they say."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.release
def test_the_notebooks_run_and_say_what_is_stored():
    command = [sys.executable, DOCS / "notebooks" / "run.py", "--check", *(path.name for path in NOTEBOOKS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=DOCS.parent)
    assert done.returncode == 0, done.stderr


def test_the_notebooks_are_there_and_small():
    assert len(NOTEBOOKS) >= 6
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 1_000_000


def notebook(source, *, stored=""):
    outputs = [{"output_type": "execute_result", "data": {"text/plain": [stored]}}] if stored else []
    return {"cells": [{"cell_type": "code", "source": [source], "outputs": outputs}]}


def test_a_check_prints_what_differs_and_goes_on(tmp_path, monkeypatch):
    """Numbers of another processor are the same; another number, and a cell that raises, do not end the check."""
    notebooks = {
        "tie": notebook("0.45625 + 0.00001", stored="0.45627"),
        "other": notebook("0.5", stored="0.75"),
        "raises": notebook("1 / 0"),
        "last": notebook("'said'", stored="'heard'"),
    }
    paths = [tmp_path / f"{name}.ipynb" for name in notebooks]
    for path, content in zip(paths, notebooks.values(), strict=True):
        path.write_text(json.dumps(content))
    monkeypatch.setattr(sys, "argv", ["run.py", "--check", *map(str, paths)])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(DOCS / "notebooks" / "run.py"), run_name="__main__")
    told = left.value.code
    assert "tie" not in told
    assert "--- other.ipynb, cell 1, stored\n+++ other.ipynb, cell 1, now\n@@ -1 +1 @@\n-0.75\n+0.5" in told
    assert "raises.ipynb: Traceback" in told
    assert "-'heard'\n+'said'" in told
