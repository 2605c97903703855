"""CONTRIBUTING's steps, followed in a copy of the repository: one file of the library, its name, and one test."""

import doctest
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAME = "best_of_group"
LIBRARY = Path("rlprims/advantage")
TEST = '''"""``best_of_group``."""

import torch

from rlprims.advantage import best_of_group
from rlprims.testing import check_advantage
from tests.records import Record

RECORDS = [Record("advantage.best_of_group", check_advantage, matters={"scale": 2.0})]


def test_by_hand() -> None:
    rewards, groups = torch.tensor([[1.0], [4.0], [1.0]]), torch.tensor([0, 0, 0])
    mask = torch.ones(3, 1, dtype=torch.bool)
    assert best_of_group(rewards, groups, mask).tolist() == [[0.0], [2.0], [0.0]]
'''


RUN_EACH = """
import runpy, sys
for name in sys.argv[1:]:
    runpy.run_module(name, run_name="__main__")
"""
"""As ``python -m``, without another start for each module."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    for name in filter(None, names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def the_function() -> str:
    """The example function of CONTRIBUTING, with its imports."""
    examples = doctest.DocTestParser().get_examples((ROOT / "CONTRIBUTING.md").read_text())
    end = next(i for i, example in enumerate(examples) if f"def {NAME}(" in example.source)
    return "".join(example.source for example in examples[: end + 1])


def add(copy: Path) -> None:
    (copy / LIBRARY / f"_{NAME}.py").write_text(
        '"""All the credit to a group\'s best response."""\n\n' + the_function()
    )
    init = copy / LIBRARY / "__init__.py"
    line = f"from rlprims.advantage._{NAME} import {NAME}\n"
    text = init.read_text().replace("from rlprims.advantage._gdpo", f"{line}from rlprims.advantage._gdpo", 1)
    init.write_text(text.replace('"beta_normalized"', f'"{NAME}", "beta_normalized"', 1))
    (copy / f"tests/advantage/test_{NAME}.py").write_text(TEST)


def pages() -> list[str]:
    """The modules that ``make pages`` runs."""
    return re.findall(r"^\t\$\(BIN\)/python -m (tools\.\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def python(copy: Path, *arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_a_new_estimator_is_one_file_its_name_and_one_test(copy: Path) -> None:
    add(copy)
    python(copy, "-c", RUN_EACH, *pages())
    checks = [f"tests/test_{what}.py" for what in ("coverage_table", "described", "release_api", "imports", "rule")]
    laws = [f"tests/test_laws.py::test_{what}[advantage.{NAME}]" for what in ("every_public_name_has_a_record", "laws")]
    python(copy, "-m", "pytest", "-q", f"tests/advantage/test_{NAME}.py", *checks, *laws)
    status = subprocess.run(["git", "status", "--short"], cwd=copy, check=True, capture_output=True, text=True)
    changed = {line[3:] for line in status.stdout.splitlines() if not line.startswith("A ")}
    written_by_hand = {f"{LIBRARY}/_{NAME}.py", f"{LIBRARY}/__init__.py", f"tests/advantage/test_{NAME}.py"}
    generated = {"docs/coverage.md", "tests/public_api.txt"}
    assert changed - generated == written_by_hand
