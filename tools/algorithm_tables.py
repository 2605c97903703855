"""Writes the tables of docs/algorithms.md: ``python -m tools.algorithm_tables``, from the root."""

import re
from collections.abc import Iterator
from pathlib import Path

from rlprims import algorithms
from rlprims.algorithms import DIALECTS, PRESETS
from tests.algorithms.test_dialects import ENTRIES, Recorded, of

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"


def presets() -> Iterator[str]:
    yield "| preset | what it is | advantage | policy loss | aggregation |"
    yield "|---|---|---|---|---|"
    for name, preset in PRESETS.items():
        a = preset()
        summary = (preset.__doc__ or "").splitlines()[0]
        parts = [str(part).replace("|", "\\|") for part in (a.advantage, a.policy_loss, a.aggregation)]
        yield f"| `{name}` | {summary} | {' | '.join(f'`{part}`' for part in parts)} |"


def dialects() -> Iterator[str]:
    yield "| dialect | preset | settings | advantages | loss |"
    yield "|---|---|---|---|---|"
    for dialect, names in DIALECTS.items():
        for name in names:
            changed = algorithms.diff(PRESETS[name](), PRESETS[name](dialect=dialect))
            settings = ", ".join(
                f"`{setting}={_short(value)}`" for setting, (_, value) in changed.items() if value is not None
            )
            entry = ENTRIES[dialect, name]
            counts = [
                str(len(of(dialect, source))) if isinstance(source, Recorded) else ""
                for source in (entry.advantages, entry.loss)
            ]
            yield f"| {dialect} | `{name}` | {settings} | {' | '.join(counts)} |"


def _short(value: object) -> str:
    return str(value).removeprefix("rlprims.")


def page(text: str) -> str:
    """The text with its tables as they should be."""
    for name, rows in (("presets", presets()), ("dialects", dialects())):
        table = "\n".join(rows)
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.S
        )
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
