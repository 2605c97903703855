"""docs/algorithms.md says what the code does."""

import re

from rlprims.algorithms import Algorithm
from tools.algorithm_tables import PAGE, page


def test_the_tables_are_those_of_the_code() -> None:
    """Write them anew with ``python -m tools.algorithm_tables``."""
    assert page(PAGE.read_text()) == PAGE.read_text()


def test_every_field_is_a_row_of_the_stages() -> None:
    table = PAGE.read_text().split("## The stages")[1].split("\nEach stage")[0]
    fields = [
        name for first in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", first)
    ]
    assert sorted(fields) == sorted(set(Algorithm.model_fields) - {"name"})
