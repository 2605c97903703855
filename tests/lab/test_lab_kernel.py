"""Notebooks in a real Jupyter kernel: what a reader sees who runs them."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "docs" / "notebooks"


def pictures(notebook: Any) -> int:
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_picture_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell loads pyplot or matplotlib's inline backend, without which a bare Figure is shown as its text."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    notebook = nbformat.read(NOTEBOOKS / "why_filters_look_at_ranges.ipynb", as_version=4)
    assert pictures(notebook) == 2
    drawn = "from examples.surrogate import surrogate; surrogate(algorithms.dapo()).draw()"
    for source in (drawn, "import matplotlib.figure; matplotlib.figure.Figure()"):
        notebook.cells.append(nbformat.v4.new_code_cell(source))
    resources = {"metadata": {"path": str(NOTEBOOKS)}}
    executed = NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    assert pictures(executed) == 3
    assert executed.cells[-1].outputs[0].data.keys() == {"text/plain"}  # so the others do need picture


def test_every_stored_picture_is_of_a_figure_that_shows_itself() -> None:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            assert "Figure(" not in source, path.name
            if pictures({"cells": [cell]}):
                assert "picture(" in source or ".draw()" in source, path.name
