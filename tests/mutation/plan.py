"""What the maths is, and which tests are to kill a mutant of one of its functions."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "rlprims"
TESTS = ROOT / "tests"
PACKAGES = ("advantage", "losses", "filters", "corrections", "logprobs", "diagnostics", "batching", "turns")
MODULES = ("layout", "masking", "ratios", "scan", "grouping", "trajectories")
NUMBERS_OF_REWARDS = ("_length", "_scores", "_tokens")
MATHS = (*PACKAGES, *MODULES, "rewards")
FAR = (["tests/test_enumeration.py", "tests/test_enumeration_losses.py", "tests/test_golden.py"], "")
OF_EVERYTHING = ("test_laws", "test_golden", "test_enumeration", "test_release")

Plan = list[tuple[list[str], str]]
"""Test files, and which of their tests: the near ones first."""


def files(what: str) -> list[Path]:
    """Those of a package or module of the maths; or the file that is named."""
    if what in PACKAGES:
        return [p for p in sorted((LIBRARY / what).glob("*.py")) if p.name != "__init__.py"]
    if what == "rewards":
        return [LIBRARY / what / f"{name}.py" for name in NUMBERS_OF_REWARDS]
    return [LIBRARY / f"{what}.py" if what in MODULES else Path(what).resolve()]


@cache
def stages(path: Path, function: str = "") -> Plan:
    """The tests of the file; its laws; and those that are far from it.

    A module below the primitives has its own tests and those of the primitives that import the function; its laws are
    those of one primitive of each of their files.
    """
    if path.parent != LIBRARY:
        near, bound = _named(path), _bound(path, public_names(path))
    else:
        users = _importing(path.stem, function)
        near = _about(path.stem) + [test for user in users for test in _named(user)]
        bound = "|".join(_bound(user, {min(public_names(user), key=str.swapcase)}) for user in users)
    near = sorted(dict.fromkeys(near), key=lambda p: p.stem != f"test_{path.stem.removeprefix('_')}")
    laws = rf"test_(laws|transforms|every_public_name_has_a_record)\[({bound})[-\]]"
    return [([str(path), *map(str, near)], ""), (["tests/test_laws.py"], laws), FAR]


def public_names(path: Path) -> set[str]:
    """The package's public names that this file defines, or that a file of the package defines that imports it."""
    package = path.parent
    found, sources = {path}, {p: p.read_text() for p in package.glob("*.py") if p.name != "__init__.py"}
    while True:
        stems = "|".join(p.stem for p in found)
        more = {
            p for p, s in sources.items() if re.search(rf"^from rlprims\.{package.name}\.({stems}) import", s, re.M)
        }
        if more <= found:
            break
        found |= more
    defined = {name for p in found for name in re.findall(r"^(?:def|class) (\w+)", p.read_text(), re.M)}
    return defined & _all(package / "__init__.py") or defined


def _all(path: Path) -> set[str]:
    """What ``__all__`` lists."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {constant.value for constant in ast.walk(node.value) if isinstance(constant, ast.Constant)}
    return set()


def _named(path: Path) -> list[Path]:
    """The tests of the file's package that name what it makes public."""
    folder = TESTS / path.parent.name
    if not folder.is_dir():
        return _about(path.parent.name)
    word = re.compile(rf"\b({'|'.join(sorted(public_names(path)))})\b")
    named = {p for p in folder.glob("test_*.py") if word.search(p.read_text())}
    if not path.stem.startswith("_"):  # it is imported by its own name too, and from anywhere
        module = f"from rlprims.{path.parent.name}.{path.stem} import "
        named |= {p for p in TESTS.rglob("test_*.py") if module in p.read_text()}
    return sorted(named)


def _about(module: str) -> list[Path]:
    """The tests of no package that import the module."""
    word = re.compile(rf"rlprims\.{module}\b|from rlprims import .*\b{module}\b")
    candidates = (p for p in sorted(TESTS.glob("test_*.py")) if not p.name.startswith(OF_EVERYTHING))
    return [p for p in candidates if word.search(p.read_text())]


def _importing(module: str, function: str) -> list[Path]:
    """The files of the maths' packages that import the function from the module; if none does, that import anything."""
    imported = {p: _imports(p, module) for what in (*PACKAGES, "rewards") for p in files(what)}
    return [p for p, names in imported.items() if function in names] or [p for p, names in imported.items() if names]


def _imports(path: Path, module: str) -> set[str]:
    nodes = (n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ImportFrom))
    return {alias.name for n in nodes if n.module == f"rlprims.{module}" for alias in n.names}


def _bound(path: Path, names: set[str]) -> str:
    return rf"{path.parent.name}\.({'|'.join(sorted(names))})"
