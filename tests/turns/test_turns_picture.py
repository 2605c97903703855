"""The picture of docs/turns.md is of today's ``merge``."""

from tests.turns.picture import COMMAND, FILE, picture


def test_the_picture_is_of_today() -> None:
    assert FILE.read_text(encoding="utf-8") == picture(), f"run {COMMAND}"
