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
from tests.trainer.runs import small_run
from tests.trainer.test_layouts import DEMONSTRATIONS, PAIRS, PROMPTS, chatml


def as_run_reads(path: Path, use: str) -> Any:
    wrapped = chatml()
    if use == "prompts":
        rows = load_examples(path, DataConfig(train=path), wrapped, max_prompt_length=10**6).rows
        return [(row.prompt, row.prompt_ids, row.answer) for row in rows]
    config = FitDataConfig(train=path)
    kind: Any = "demonstrations" if use == "demonstrations" else "pairs"
    return list(Reader(config, kind, wrapped, wrapped.convert_tokens_to_ids(["<|im_end|>"]), 10**6).read(path).rows)


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


def test_rlprims_data_fits_80_columns(
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


def test_the_rows_of_a_run_and_golds_that_its_verifier_cannot_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny.save_model(tmp_path / "model")
    rows = [{"question": "1+1=", "answer": gold} for gold in ("2", r"\frac{", "forty two", "3")]
    rows += [{"question": "1" * 30, "answer": "4"}, {"question": "1+1=", "answer": "2"}]
    path = tiny.write_jsonl(tmp_path / "math500.jsonl", rows)
    held_out = tiny.write_jsonl(tmp_path / "held_out.jsonl", rows[3:4])
    settings = small_run(model, path, tmp_path / "run") | {"verifier": "rlprims.rewards.verifiers.by_source"}
    settings["data"] = {"train": str(path), "eval": str(held_out), "max_prompt_length": 20}
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(settings))
    assert main(["data", str(config)]) == 0
    shown = capsys.readouterr().out
    assert f"{path}: 6 rows; question in question, answer in answer" in shown
    assert "1+1=" in shown
    assert "duplicates: 1; rows that cannot be used: 3" in shown
    assert f"{path}:2: the answer cannot be scored" in shown  # and row 3, of the same cause
    assert f"{path}:5: the prompt is too long: 30 tokens, data.max_prompt_length is 20" in shown
    assert f"rows of {held_out} that are also in {path}: 1" in " ".join(shown.split())
    assert not (tmp_path / "run").exists()
    assert main(["data", str(config), "data.max_prompt_length=40"]) == 0
    assert "rows that cannot be used: 2" in capsys.readouterr().out
    assert main(["data", str(path), "data.max_prompt_length=40"]) == 2


def test_the_rows_of_other_kinds_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.save_model(tmp_path / "model")
    pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": bad} for bad in ("3", 4)]
    fit = {"loss": "dpo", "run_dir": str(tmp_path / "run"), "model": {"path": str(model)}}
    fit |= {"data": {"train": str(tiny.write_jsonl(tmp_path / "pairs.jsonl", pairs))}}
    numbers = tiny.write_jsonl(tmp_path / "numbers.jsonl", [{"a": 1, "b": 2}, {"a": 1}])
    plays = small_run(model, numbers, tmp_path / "run")
    plays["verifier"] = None
    plays["data"] = {"train": str(numbers), "environment": "tests.trainer.environments.Sum"}
    for name, settings in (("fit", fit), ("plays", plays)):
        (tmp_path / f"{name}.yaml").write_text(json.dumps(settings))
    assert main(["data", str(tmp_path / "fit.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "1+1=⟦2<eos>⟧\nrejected: 3<eos>\n" in shown
    assert "pairs.jsonl:2: expected a text in 'rejected', got 4" in shown
    assert main(["data", str(tmp_path / "plays.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "  a: 1\n  b: 2" in shown
    assert "rows that cannot be used: 1" in shown
    assert f"{numbers}:2: tests.trainer.environments.Sum takes ['b']; the row has ['a']" in shown


def test_names_of_the_uses(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["data", "rows.jsonl", "--use", "all"])
    assert main(["data", str(tmp_path / "none.jsonl")]) == 2
