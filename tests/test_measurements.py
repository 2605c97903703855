"""Numbers that were measured: a line below them names the command that makes them, and the commit where it ran."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINE = re.compile(r"Measured\s+by\s+((?:[^`.:]*`[^`]+`)+) at ([0-9a-f]{7})\+?\b")
LINES = [
    pytest.param(path, *found, id=f"{path.relative_to(ROOT)}-{found[1]}")
    for path in PAGES
    for found in LINE.findall(path.read_text())
]
WORDS = r"measured|accuracy|CPU s|CPU time|ms|killed|right|before \|"
TABLE = re.compile(rf"^\|.*\b(?:{WORDS}).*\|\n\|[-:| ]+\|$", re.MULTILINE)
"""A table with such a word in its head."""


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=False)


def releases() -> list[str]:
    """The newest first."""
    return re.findall(r"^## (\d\S*), ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("page", "commands", "commit"), LINES)
def test_the_command_is_in_the_tree(page: Path, commands: str, commit: str) -> None:
    for command in re.findall(r"`([^`]+)`", commands):
        words = command.split()
        files = [word for word in words if re.search(r"^(examples|tests)/", word)]
        if words[:2] == ["python", "-m"]:
            files.append(words[2].replace(".", "/"))
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
        else:
            assert files, f"{command}: expected a target of make, a module or a file"
        for file in files:
            assert (ROOT / file).exists() or (ROOT / f"{file}.py").exists(), f"{page}: {command}"


@pytest.mark.parametrize(("page", "commands", "commit"), LINES)
def test_numbers_are_at_most_a_release_old(page: Path, commands: str, commit: str) -> None:
    """By the version at the commit; those of code that has not changed since then may be older."""
    if shutil.which("git") is None or git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("this is no clone with its history")
    version = re.search(r'__version__ = "(\S+)"', git("show", f"{commit}:rlprims/__init__.py").stdout)
    assert version, f"{page}: {commit} is no commit of this history"
    if releases().index(version[1]) > 1:
        assert not git("diff", "--name-only", commit, "--", "rlprims").stdout, f"{page}: run {commands} again"


def test_every_page_with_a_table_of_measures_has_the_line() -> None:
    without = {page for page in PAGES if TABLE.search(text := page.read_text()) and not LINE.search(text)}
    assert without == set(), "write: Measured by `the command` at the commit"
