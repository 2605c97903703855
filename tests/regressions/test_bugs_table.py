"""README.md names every entry once, and only tests and laws that there are."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SIZES = {"M": 19, "G": 17, "L": 17, "R": 16, "K": 11, "E": 10, "T": 14, "O": 12, "V": 8, "F": 8, "D": 12, "S": 12}
SIZES |= {"W": 12, "P": 11, "X": 8, "B": 31, "C": 7, "N": 9, "H": 6}
ROWS = re.findall(r"^\| ([A-Z]\d+) \| (.+) \| (.+) \|$", (HERE / "README.md").read_text(encoding="utf-8"), re.M)
LAWS = "".join(path.read_text(encoding="utf-8") for path in (HERE.parents[1] / "rlprims/testing").glob("_laws_*.py"))


def test_every_entry_is_there_once() -> None:
    assert [entry for entry, _, _ in ROWS] == [f"{kind}{i}" for kind, n in SIZES.items() for i in range(1, n + 1)]


@pytest.mark.parametrize(("entry", "held"), [(entry, held) for entry, _, held in ROWS])
def test_bugs_table_names_tests_that_exist(entry: str, held: str) -> None:
    if test := re.fullmatch(r"`(\S+)::(test_\w+)`", held):
        folder = HERE if test[1].startswith("test_bugs_") else HERE.parent
        assert f"def {test[2]}(" in (folder / test[1]).read_text(encoding="utf-8"), entry
    elif law := re.fullmatch(r"law `(\w+)`", held):
        assert f"def {law[1]}(" in LAWS, entry
    else:
        assert held.startswith("not here: "), entry


def test_every_test_of_this_folder_begins_with_its_entry() -> None:
    entries = {entry.lower() for entry, _, _ in ROWS}
    for path in HERE.glob("test_bugs_*.py"):
        names = re.findall(r"^def test_(\w+)\(", path.read_text(encoding="utf-8"), re.M)
        strangers = {name for name in names if name.split("_")[0] not in entries}
        assert path == Path(__file__) or strangers <= {"an_offence_is_found"}, path.name
