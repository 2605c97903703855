"""Rows that a run keeps: as they were, on disk, whatever their values are."""

import datetime
import math
import tracemalloc
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rlprims.runs.rows import OnDisk
from rlprims.trainer.data import DataConfig, Example, load_examples
from tests import tiny

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.dates(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)


@given(st.lists(VALUES, max_size=6))
def test_every_value_comes_back_as_it_was(values: list[Any]) -> None:
    rows = OnDisk[Any](lambda value: value)
    for value in values:
        rows.append(value)
    assert repr(list(rows)) == repr(values) == repr(rows[:])
    assert [rows[-i] for i in range(1, len(values) + 1)] == values[::-1]


def test_numbers_and_texts_that_json_finds_hard() -> None:
    hard = [10**4000, math.nan, -0.0, math.inf, "\ud800\x00\u2028", {"1": (1, 2)}, {1: 2}, datetime.date(2026, 1, 2)]
    rows = OnDisk[Any](lambda value: value)
    for value in hard:
        rows.append([value])
    assert repr([row[0] for row in rows]) == repr(hard)
    rows.append([10**5000])  # more digits than Python reads
    assert rows[-1] == [10**5000]


def test_rows_of_a_run_are_not_in_memory(tmp_path: Path) -> None:
    """A thousand rows of ten kilobytes: less than a tenth of them is held."""
    made = [{"question": f"{i}+1=", "answer": f"{i + 1}", "source": "x" * 10_000} for i in range(1000)]
    config = DataConfig(train=tiny.write_jsonl(tmp_path / "rows.jsonl", made))
    tokenizer = tiny.tokenizer()
    tracemalloc.start()
    rows = load_examples(config.train, config, tokenizer, max_prompt_length=50).rows
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_000_000
    assert isinstance(rows[999], Example)
    assert (rows[999].prompt, rows[999].answer, len(rows)) == ("999+1=", "1000", 1000)
