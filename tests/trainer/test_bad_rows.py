"""Rows that cannot be used: one message with every cause, or left out and counted."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlprims.fit.config import FitDataConfig
from rlprims.fit.rows import Reader
from rlprims.trainer.data import DataConfig, load_examples
from tests import tiny

GOOD = {"question": "1+1=", "answer": "2"}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path, **settings: Any) -> Any:
    return load_examples(path, DataConfig(train=path, **settings), tiny.tokenizer(), max_prompt_length=50)


def test_a_hundred_bad_rows_are_one_message(tmp_path: Path) -> None:
    rows = [GOOD, *[{"question": str(i)} for i in range(60)], *["{" + "x" * i for i in range(40)], "[1]"]
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match="rows cannot be used") as error:
        read(path)
    lines = str(error.value).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(f"{path}:2: field 'answer' is missing")
    assert lines[0].endswith("(and 59 more: 3, 4, 5, 6, 7, ...)")
    assert lines[1].startswith(f"{path}:62: not JSON")
    assert "(and 39 more: 63, 64, 65, 66, 67, ...)" in lines[1]
    assert lines[2] == f"{path}:102: expected an object with fields, got list"
    assert lines[3] == f"{path}: 101 rows cannot be used: mend them, or set data.on_bad_row: skip"


def test_bad_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [GOOD, "{", {"question": ""}, GOOD | {"question": "2+2="}])
    found = read(path, on_bad_row="skip")
    assert [row.prompt for row in found.rows] == ["1+1=", "2+2="]
    assert found.bad.count == 2
    assert found.bad.text().splitlines()[0].startswith(f"{path}:2: not JSON")
    pairs = write(tmp_path / "pairs.jsonl", [{"prompt": "1", "chosen": "2", "rejected": each} for each in ("3", None)])
    config = FitDataConfig(train=pairs, on_bad_row="skip")
    rows = Reader(config, "pairs", tiny.tokenizer(), [tiny.EOS_ID], 64).read(pairs)
    assert (len(rows.rows), rows.bad.count) == (1, 1)


def test_a_file_of_bad_rows_alone_still_stops(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ["{", {"question": 3}])
    with pytest.raises(ValueError, match=r"nothing to train on: .*rows.jsonl:1: not JSON"):
        read(path, on_bad_row="skip")


def test_a_row_that_no_tokenizer_can_read_is_a_bad_row(tmp_path: Path) -> None:
    for text, reason in [('"\\ud800"', "half of a surrogate pair"), ("1e400", "1e400 is larger than any float")]:
        path = write(tmp_path / "rows.jsonl", ['{"question": ' + text + ', "answer": "1"}'])
        with pytest.raises(ValueError, match=rf"rows.jsonl:1: .*{reason}"):
            read(path)


def test_a_template_that_raises_is_a_bad_row(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    path = write(tmp_path / "rows.jsonl", [GOOD])
    config = DataConfig(train=path, template="chat", system="be brief")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the chat template refuses the messages: no system role"):
        load_examples(path, config, tokenizer, max_prompt_length=50)


def test_overlong_prompts_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "1234567", "response": "8"}])
    config = FitDataConfig(train=path, max_prompt_length=3, overlong_prompts="truncate")
    (row,) = Reader(config, "demonstrations", tiny.tokenizer(), [tiny.EOS_ID], 64).read(path).rows
    assert tiny.tokenizer().decode(row.prompt_ids) == "567"


@pytest.mark.parametrize(
    ("answer", "read_as"),
    [
        ("null", None),
        ("[]", []),
        ("{}", {}),
        ('[{"name": "f", "arguments": {"a": null}}]', [{"name": "f", "arguments": {"a": None}}]),
        ('"[1, 2]"', "[1, 2]"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        ('{"n": 123456789012345678901234567890}', {"n": 123456789012345678901234567890}),
        ('"\\u0000 \\u2028"', "\0 \u2028"),
    ],
)
def test_answers_as_they_are(tmp_path: Path, answer: str, read_as: Any) -> None:
    (row,) = read(write(tmp_path / "rows.jsonl", ['{"question": "1", "answer": ' + answer + "}"])).rows
    assert row.answer == read_as
    assert type(row.answer) is type(read_as)


def test_the_text_of_a_record_is_the_same_after_it_is_written_and_read(tmp_path: Path) -> None:
    text = "a\ud800b\0c\u2028d\r\ne\x85f"
    path = write(tmp_path / "rows.jsonl", [GOOD | {"note": text}, GOOD])
    found = read(path).rows
    assert (len(found), found[0].fields["note"]) == (2, text)
