"""What a release is: its two files hold what they should, and the wheel works in an empty environment, types included.

The environment has the wheel and the core dependencies of constraints/dev.txt, nothing else: no extra, no pytest. About
a minute and a half on two cores, most of it torch.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import rlprims

ROOT = Path(__file__).parents[1]
CLIENT = Path(__file__).parent / "typed_client"
MACHINE_PATH = re.compile(rb"[\"' (](/home/|/root/|/Users/|/mnt/|/tmp/tmp)\w")
DOCTEST = "import doctest, sys; sys.exit(doctest.testfile(sys.argv[1], False)[0])"


def run(*command: str | Path, cwd: Path, check: bool = True) -> str:
    """The output of a command; with ``check`` the test fails with it if the command does."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert not check or done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def core_dependencies() -> set[str]:
    """The names of the packages that pyproject.toml declares, without extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {re.split(r"\W", requirement)[0] for requirement in project["dependencies"]}


def test_every_core_dependency_is_imported() -> None:
    trees = [ast.parse(path.read_text()) for path in (ROOT / "rlprims").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    imported = {module.partition(".")[0] for module in modules}
    assert "torch" in core_dependencies()
    assert core_dependencies() - imported == set()


def test_the_version_stands_in_one_place_and_in_the_changelog() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "rlprims/__init__.py"
    newest = re.search(r"^## (\S+), ", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] == rlprims.__version__


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both files; the wheel is built from the sdist, as an installer would."""
    dist = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", dist, ROOT, cwd=dist)
    return dist


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment in which only the wheel was installed."""
    home = tmp_path_factory.mktemp("fresh") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=built)
    pip = (sys.executable, "-m", "pip", "--python", home)
    wheel = next(built.glob("*.whl"))
    run(*pip, "install", "-q", "--no-compile", "-c", ROOT / "constraints" / "dev.txt", wheel, cwd=built)
    run(*pip, "check", cwd=built)
    return home / "bin" / "python"


@pytest.mark.slow
def test_the_sdist_is_the_package_and_what_describes_it(built: Path) -> None:
    sdist = next(built.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2]: archive.extractfile(name) for name in archive.getnames()}
        contents = {name: file.read() for name, file in files.items() if file}
    assert sdist.stat().st_size < 2**20
    assert {name for name, text in contents.items() if MACHINE_PATH.search(text)} == set()
    if (ROOT / ".git").exists():  # an unpacked sdist has none
        known = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
        sources = {name for name in known if name.startswith("rlprims/") and (ROOT / name).exists()}
        beside = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", ".gitignore"}
        assert set(contents) - {"PKG-INFO"} == sources | beside


@pytest.mark.slow
def test_the_wheel_is_the_package_alone(built: Path) -> None:
    wheel = next(built.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(archive.read(name).decode() for name in names if name.endswith("dist-info/METADATA"))
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "rlprims").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert "rlprims/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"rlprims"}
    assert wheel.stat().st_size < 2**20
    required = re.findall(r"^Requires-Dist: (\w+)[^;\n]*$", metadata, re.M)
    assert set(required) == core_dependencies()
    assert f"\nVersion: {rlprims.__version__}\n" in metadata


@pytest.mark.slow
def test_an_index_would_take_both_files(built: Path) -> None:
    """Their metadata and the README as a package's page."""
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)


@pytest.mark.slow
def test_the_wheel_works_without_any_extra(python: Path, tmp_path: Path) -> None:
    where = run(python, "-c", "import rlprims; print(rlprims.__file__)", cwd=tmp_path)
    assert where.strip().startswith(str(python.parents[1]))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")  # the page is read in a clone
    run(python, "-c", DOCTEST, ROOT / "README.md", cwd=tmp_path)
    run(python, CLIENT / "client.py", cwd=tmp_path)
    assert "usage: rlprims" in run(python.parent / "rlprims", "--help", cwd=tmp_path)
    assert "clip_high=0.28" in run(python.parent / "rlprims", "algorithms", "dapo", cwd=tmp_path)
    bare = subprocess.run([python.parent / "rlprims", "train", "x.yaml"], capture_output=True, text=True)
    assert (bare.returncode, bare.stderr.count("\n")) == (2, 1)
    assert "pip install '.[train]' in the clone" in bare.stderr


def mypy(python: Path, name: str, folder: Path) -> set[int]:
    """The lines of errors."""
    (folder / "mypy.ini").write_text("[mypy]\nstrict = true\n")
    options = ("--config-file", "mypy.ini", "--python-executable", python, "--cache-dir", folder / "cache")
    said = run(sys.executable, "-m", "mypy", *options, folder / name, cwd=folder, check=False)
    assert re.search(r"^(Success|Found \d+ errors? in 1 file)", said, re.M), said
    return {int(line) for line in re.findall(r":(\d+): error: ", said)}


def pyright(python: Path, name: str, folder: Path) -> set[int]:
    """The lines of errors, in its strict mode; only torch's own methods may have types that are not whole."""
    settings = {"typeCheckingMode": "strict", "reportUnknownMemberType": False, "include": [str(folder / name)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = (sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", python)
    said = json.loads(run(*command, cwd=folder, check=False))
    assert said["summary"]["filesAnalyzed"] == 1, said
    return {found["range"]["start"]["line"] + 1 for found in said["generalDiagnostics"] if found["severity"] == "error"}


@pytest.mark.slow
@pytest.mark.parametrize("checker", [mypy, pytest.param(pyright, marks=pytest.mark.release)])
def test_the_installed_types_pass_a_strict_client_and_catch_each_mistake(
    checker: Callable[[Path, str, Path], set[int]], python: Path, tmp_path: Path
) -> None:
    shutil.copytree(CLIENT, tmp_path, dirs_exist_ok=True)  # out of the repository, whose own files would be found
    assert checker(python, "client.py", tmp_path) == set()
    lines = (CLIENT / "mistakes.py").read_text().splitlines()
    assert checker(python, "mistakes.py", tmp_path) == {i for i, line in enumerate(lines, 1) if "# wrong: " in line}
