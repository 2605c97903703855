"""``rlprims data``: what a file has, and the same rows in the fields that a run reads by default."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlprims.cli import main
from rlprims.fit.config import FitDataConfig
from rlprims.fit.rows import Reader
from rlprims.trainer.data import DataConfig, load_examples
from tests import tiny
from tests.trainer.test_layouts import DEMONSTRATIONS, PAIRS, PROMPTS, chatml


def as_run_reads(path: Path, use: str) -> Any:
    wrapped = chatml()
    if use == "prompts":
        rows = load_examples(path, DataConfig(train=path), wrapped, max_prompt_length=10**6).rows
        return [(row.prompt, row.prompt_ids, row.answer) for row in rows]
    config = FitDataConfig(train=path)
    kind: Any = "demonstrations" if use == "demonstrations" else "pairs"
    return Reader(config, kind, wrapped, wrapped.convert_tokens_to_ids(["<|im_end|>"]), 10**6).read(path).rows


ROWS = [
    *[("prompts", row) for _, row, *_ in PROMPTS],
    *[("demonstrations", row) for _, row in DEMONSTRATIONS],
    *[("pairs", row) for _, row in PAIRS],
]


@pytest.mark.parametrize(("use", "row"), ROWS, ids=[str(i) for i in range(len(ROWS))])
def test_converted_rows_are_read_as_the_original(tmp_path: Path, use: str, row: dict[str, Any]) -> None:
    path, to = tiny.write_jsonl(tmp_path / "rows.jsonl", [row]), tmp_path / "out.jsonl"
    assert main(["data", str(path), "--use", use, "--to", str(to)]) == 0
    assert as_run_reads(to, use) == as_run_reads(path, use)
    assert main(["data", str(path), "--to", str(to)]) == 2  # it exists


def test_what_is_shown_fits_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.save_model(tmp_path / "model")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer.save_pretrained(model)
    chats = [[{"role": "user", "content": f"{i % 4}+1="}, {"role": "assistant", "content": "2"}] for i in range(6)]
    rows: list[Any] = [{"messages": chat} for chat in chats]
    path = tiny.write_jsonl(tmp_path / "rows.jsonl", [*rows, {"messages": 3}])
    held_out = tiny.write_jsonl(tmp_path / "held_out.jsonl", [rows[1], {"messages": [chats[0][0], chats[0][1]] * 2}])
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["data", str(path), "--model", str(model), "--eval", str(held_out)]) == 0
    shown = capsys.readouterr().out
    assert "7 rows; messages in messages" in shown
    assert "0+1=<eos>⟦2<eos>⟧" in shown
    assert "duplicates: 2; rows that cannot be used: 1" in shown
    assert f"{path}:7: expected a list of messages in 'messages', got 3" in shown
    assert f"rows of {held_out} that are also in {path}: 1" in " ".join(shown.split())
    assert max(len(line) for line in shown.splitlines() if str(tmp_path) not in line) <= 80
    assert main(["data", str(path)]) == 0
    assert json.dumps(chats[0][0])[:20] in capsys.readouterr().out


def test_names_of_the_uses(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["data", "rows.jsonl", "--use", "all"])
    assert main(["data", str(tmp_path / "none.jsonl")]) == 2
