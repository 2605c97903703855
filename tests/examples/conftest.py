"""SmolLM2-135M-Instruct, fetched once and kept in the user's cache: 93 MB, and half a minute to convert."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm") / "base"
    command = [sys.executable, str(ROOT / "examples" / "smollm" / "fetch.py"), "--out", str(out)]
    said = subprocess.run(command, capture_output=True, text=True)
    if "could not download" in said.stderr:
        pytest.skip(said.stderr.splitlines()[0])
    assert said.returncode == 0, said.stderr
    return out
