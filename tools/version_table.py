"""Writes the tables of versions that were tried, in docs/versions.md: ``python -m tools.version_table``, from the root.

``--ask`` first asks the index for the newest version of each package, and writes them with the day into
tools/versions_tried.json. What happened with them is written there by hand.
"""

import datetime
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"
TRIED = Path(__file__).with_name("versions_tried.json")
BLOCK = re.compile(r"(<!-- versions -->\n).*?(<!-- end -->)", re.DOTALL)
TESTED = {
    **dict.fromkeys(("torch", "transformers"), ("dev", "")),
    **{"vllm": ("ray", "-cpu"), "ray": ("ray", "")},
    **dict.fromkeys(("trl", "verl"), ("bench", "")),
}
"""The file of constraints that has the version of a package that CI uses, and what the CPU build's name has besides."""


def _lowest(package: str) -> str:
    """The lowest bound of pyproject.toml that suffices for ``train`` or for the package's own extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    bounds = [re.match(rf"{package}>=([\d.]+)", each) for each in (each for extra in extras.values() for each in extra)]
    return next((bound[1] for bound in bounds if bound), "")


def _tested(package: str) -> str:
    file, build = TESTED[package]
    text = (ROOT / "constraints" / f"{file}.txt").read_text()
    found = re.search(rf"^{package}{build}==(\S+)", text, re.MULTILINE)
    assert found, package
    return found[1]


def _newest(package: str) -> str:
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    return re.search(r"\((.+?)\)", subprocess.run(command, capture_output=True, text=True, check=True).stdout)[1]  # type: ignore[index]


def page() -> str:
    """The page with the tables of today."""
    tried = json.loads(TRIED.read_text())
    lines = [f"| package | lowest | in CI | newest on {tried['day']} | what happened |", "|---|---|---|---|---|"]
    for name in TESTED:
        newest, what = tried["newest"][name], tried["what"][name]
        lines.append(f"| {name} | {_lowest(name)} | {_tested(name)} | {newest} | {what} |")
    lines += ["", "| versions of others | what happened |", "|---|---|"]
    lines += [f"| {name} | {what} |" for name, what in tried["others"].items()]
    return BLOCK.sub(lambda match: match[1] + "\n" + "\n".join(lines) + "\n\n" + match[2], PAGE.read_text())


if __name__ == "__main__":
    if sys.argv[1:] == ["--ask"]:
        tried = json.loads(TRIED.read_text())
        tried |= {"day": str(datetime.date.today()), "newest": {name: _newest(name) for name in TESTED}}
        TRIED.write_text(json.dumps(tried, indent=2) + "\n")
    PAGE.write_text(page())
