"""docs/coverage.md says what binds each primitive, and is of today."""

from tools.coverage_table import TABLE, table


def test_the_table_is_of_today() -> None:
    assert TABLE.read_text() == table(), "docs/coverage.md is stale: run python -m tools.coverage_table"
