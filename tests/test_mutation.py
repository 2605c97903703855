"""``make mutants-changed`` breaks what a change touched, and nothing that only moved or was described anew."""

import subprocess
from pathlib import Path

import pytest

from tests.mutation.changed import changed_functions, default_base

BEFORE = '''
LIMIT = 3

def double(x: int) -> int:
    """Twice."""
    return 2 * x

def half(x):
    return x / 2

class Sum:
    def add(self, x):
        self.x += x
'''
OTHER = """
def third(x):
    return x / 3
"""


def git(root: Path, *args: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *args], cwd=root, check=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "maths" / "deep").mkdir(parents=True)
    (tmp_path / "maths" / "a.py").write_text(BEFORE)
    (tmp_path / "maths" / "deep" / "b.py").write_text(OTHER)
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def changed(root: Path, a: str, b: str = OTHER) -> dict[str, set[str]]:
    (root / "maths" / "a.py").write_text(a)
    (root / "maths" / "deep" / "b.py").write_text(b)
    found = changed_functions(root, "main", "maths")
    return {str(path.relative_to(root / "maths")): names for path, names in found.items()}


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("2 * x", "3 * x", {"double"}),
        ("+=", "-=", {"Sum.add"}),
        ("LIMIT = 3", "LIMIT = 4", {""}),
        ("def half(x)", "def half(x, y=1)", {"half"}),
        ("def half(x)", "def halved(x)", {"halved"}),
    ],
)
def test_a_function_with_other_code_is_changed(root: Path, old: str, new: str, names: set[str]) -> None:
    assert changed(root, BEFORE.replace(old, new)) == {"a.py": names}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Twice.", "Two times."),
        ("    return x / 2", "    # a comment\n    return (x / 2)"),
        ("x: int", "x: float"),
        (") -> int", ")"),
    ],
)
def test_changed_functions_ignores_words_and_types(root: Path, old: str, new: str) -> None:
    assert changed(root, BEFORE.replace(old, new)) == {}


def test_changed_functions_ignores_moves_to_another_file(root: Path) -> None:
    half = "def half(x):\n    return x / 2\n"
    assert changed(root, BEFORE.replace(half, ""), OTHER + half) == {}
    assert changed(root, BEFORE.replace(half, ""), OTHER + half.replace("2", "4")) == {"deep/b.py": {"half"}}


def test_the_base_is_where_the_branch_left_main_and_on_main_an_earlier_commit(root: Path) -> None:
    def head() -> str:
        return subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()

    first = head()
    for i in range(12):
        git(root, "commit", "-q", "--allow-empty", "-m", str(i))
        if i == 1:
            early = head()
    assert default_base(root) == early  # ten commits before
    git(root, "checkout", "-q", "-b", "work", first)
    git(root, "commit", "-q", "--allow-empty", "-m", "on the branch")
    assert default_base(root) == first
