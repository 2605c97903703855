"""What is public is what tests/public_api.txt says: a change of it is seen, and meant."""

from difflib import unified_diff

from tools.public_api import COMMAND, FILE, table


def test_the_public_names_and_their_signatures_are_the_pinned_ones() -> None:
    pinned, now = FILE.read_text().splitlines(), table().splitlines()
    changes = [line for line in unified_diff(pinned, now, lineterm="", n=0) if line[:3] not in ("---", "+++")]
    changes = [line for line in changes if not line.startswith("@@")]
    advice = f"docs/versions.md says what may change and how; if this is meant: {COMMAND}"
    assert not changes, "\n".join(["the public API changed:", *changes, advice])
