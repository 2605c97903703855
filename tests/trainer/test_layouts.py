"""The files of other libraries and data sets, each with a small file of our own."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rlprims.fit.config import FitDataConfig
from rlprims.fit.rows import Reader, StoredRows
from rlprims.runs.layouts import value_at
from rlprims.trainer.data import DataConfig, Example, load_examples
from tests import tiny
from tests.turns import chat_templates as templates
from tests.turns.tokenizers import tokenizer

CHAT = [{"role": "user", "content": "1+1?"}]
SAID = [*CHAT, {"role": "assistant", "content": "QX"}]
TOOL = {"name": "add", "description": "Add.", "parameters": {"a": {"type": "int"}}}
CALL = {"name": "add", "arguments": {"a": 1}}

CASES = '{"inputs": ["1"], "outputs": ["2"]}'


def chatml() -> Any:
    return tokenizer("byte-level", templates.CHATML, "<|im_end|>")


def examples(path: Path, **settings: Any) -> Any:
    return load_examples(path, DataConfig(train=path, **settings), chatml(), max_prompt_length=10**6)


def example(folder: Path, row: dict[str, Any], expected: str | None, **settings: Any) -> Example:
    found = examples(tiny.write_jsonl(folder / "rows.jsonl", [row]), **settings)
    assert (found.layout or "").partition(":")[0] == (expected or "")
    (only,) = found.rows
    return only


PROMPTS: list[tuple[str | None, dict[str, Any], Any, str]] = [
    ("verl", {"data_source": "gsm8k", "prompt": CHAT, "reward_model": {"ground_truth": "2"}}, "2", "gsm8k"),
    ("verl", {"data_source": "math_dapo", "prompt": CHAT, "reward_model": {"ground_truth": 34}}, "34", "math_dapo"),
    ("tulu", {"messages": CHAT, "ground_truth": "2", "dataset": "gsm8k"}, "2", "gsm8k"),
    ("verifiers", {"prompt": CHAT, "answer": "2", "task": "sums", "info": {}}, "2", "sums"),
    ("trl", {"prompt": CHAT, "solution": "2"}, "2", "rows"),
    ("math", {"problem": "1+1?", "answer": "2", "solution": "It is 2."}, "2", "rows"),
    ("math solutions", {"problem": "1+1?", "solution": r"It is \boxed{2}."}, r"It is \boxed{2}.", "rows"),
    ("xlam", {"query": "1+1?", "answers": json.dumps([CALL]), "tools": json.dumps([TOOL])}, json.dumps([CALL]), "rows"),
    ("apps", {"question": "1+1?", "input_output": CASES}, CASES, "rows"),
    (
        "livecodebench",
        {"question_content": "1+1?", "public_test_cases": '[{"input": "1", "output": "2", "testtype": "stdin"}]'},
        {"inputs": ["1"], "outputs": ["2"]},
        "rows",
    ),
    (None, {"question": "1+1?", "answer": "so #### 2"}, "so #### 2", "rows"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "row", "answer", "source"), PROMPTS, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(PROMPTS)]
)
def test_prompts(tmp_path: Path, layout: str | None, row: dict[str, Any], answer: Any, source: str) -> None:
    found = example(tmp_path, row, layout, template="chat")
    assert found.prompt == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert (found.question, found.answer, found.data_source) == ("1+1?", answer, source)
    assert found.fields == row


def stored(path: Path, kind: Any = "demonstrations", template: str = templates.CHATML, **settings: Any) -> StoredRows:
    wrapped = tokenizer("byte-level", template, "<|im_end|>")
    config = FitDataConfig(train=path, **settings)
    return Reader(config, kind, wrapped, wrapped.convert_tokens_to_ids(["<|im_end|>"]), 10**6).read(path)


def texts(rows: StoredRows) -> list[str]:
    (row,) = rows.rows
    return [chatml().decode(row.prompt_ids), *(chatml().decode(each.ids) for each in row.responses)]


ASKED = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
SHAREGPT = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "QX"}]
DEMONSTRATIONS: list[tuple[str | None, dict[str, Any]]] = [
    (None, {"messages": SAID}),
    ("sharegpt", {"conversations": SHAREGPT}),
    ("trl", {"prompt": CHAT, "completion": SAID[1:]}),
    (None, {"prompt": CHAT, "response": "QX"}),
]


@pytest.mark.parametrize(("layout", "row"), DEMONSTRATIONS)
def test_demonstrations(tmp_path: Path, layout: str | None, row: dict[str, Any]) -> None:
    rows = stored(tiny.write_jsonl(tmp_path / "rows.jsonl", [row]))
    assert texts(rows) == [ASKED, "QX<|im_end|>"]
    assert (rows.layout or "").partition(":")[0] == (layout or "")


@pytest.mark.parametrize(
    "row",
    [{"prompt": "1+1=", "completion": "Q"}, {"question": "1+1=", "answer": "Q"}, {"problem": "1+1=", "solution": "Q"}],
)
def test_demonstrations_as_text(tmp_path: Path, row: dict[str, Any]) -> None:
    assert texts(stored(tiny.write_jsonl(tmp_path / "rows.jsonl", [row]))) == ["1+1=", "Q<|im_end|>"]


def test_calls_of_tools_of_toolace_and_xlam(tmp_path: Path) -> None:
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    said = [SHAREGPT[0], {"from": "function_call", "value": json.dumps(CALL)}]
    for row in (
        {"system": "You help.", "conversations": said},
        {"query": "1+1?", "answers": json.dumps([CALL]), "tools": json.dumps([TOOL])},
    ):
        rows = stored(tiny.write_jsonl(tmp_path / "rows.jsonl", [row]), template=templates.QWEN_TOOLS)
        assert texts(rows)[1] == called
        assert ("You help." if "system" in row else '"name": "add"') in texts(rows)[0]


DIALOGUE = "\n\nHuman: 1+1?\n\nAssistant: "
PAIRS: list[tuple[str | None, dict[str, Any]]] = [
    ("hh", {"chosen": DIALOGUE + "QX", "rejected": DIALOGUE + "J"}),
    ("ultrafeedback", {"chosen": SAID, "rejected": [*CHAT, {"role": "assistant", "content": "J"}]}),
    (None, {"prompt": "1+1?", "chosen": SAID, "rejected": [*CHAT, {"role": "assistant", "content": "J"}]}),
    (None, {"prompt": CHAT, "chosen": SAID[1:], "rejected": [{"role": "assistant", "content": "J"}]}),
    ("sharegpt", {"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": {"from": "gpt", "value": "J"}}),
]


@pytest.mark.parametrize(("layout", "row"), PAIRS)
def test_pairs(tmp_path: Path, layout: str | None, row: dict[str, Any]) -> None:
    rows = stored(tiny.write_jsonl(tmp_path / "rows.jsonl", [row]), "pairs")
    assert texts(rows) == [ASKED, "QX<|im_end|>", "J<|im_end|>"]
    assert (rows.layout or "").partition(":")[0] == (layout or "")


def test_a_layout_by_name_and_fields_by_path(tmp_path: Path) -> None:
    row = {"question": "no", "answer": "no", "problem": "1+1?", "solution": "2", "extra": {"all": [{"q": "3?"}]}}
    assert example(tmp_path, row, "math solutions", layout="math solutions").question == "1+1?"
    assert example(tmp_path, row, None, question="extra.all[-1].q").question == "3?"
    assert example(tmp_path, row, "math solutions", layout="math solutions", answer="answer").answer == "no"
    with pytest.raises(ValueError, match="no 'verk' for prompts: choose from verl"):
        example(tmp_path, row, None, layout="verk")
    assert value_at({"a.b": 1, "a": {"b": 2}}, "a.b") == 1


ROWS = [{"question": f"{i}?", "answer": str(i), "extra": {"level": i}} for i in range(5)]


def test_read_rows_gives_the_same_rows_of_every_format(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    datasets = pytest.importorskip("datasets")
    from pyarrow import parquet

    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    table = pyarrow.Table.from_pylist(ROWS)
    (tmp_path / "plain.jsonl").write_text(text)
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "utf-16.jsonl").write_bytes(text.encode("utf-16"))
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    with pyarrow.output_stream(str(tmp_path / "packed.jsonl.zst"), compression="zstd") as stream:
        stream.write(text.encode())
    (tmp_path / "array.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "lines.json").write_text(text)
    parquet.write_table(table, tmp_path / "rows.parquet")
    for name, opened in (("stream.arrow", pyarrow.ipc.new_stream), ("file.arrow", pyarrow.ipc.new_file)):
        with pyarrow.OSFile(str(tmp_path / name), "wb") as sink, opened(sink, table.schema) as writer:
            writer.write_table(table)
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 11
    for path in paths:
        found = examples(path)
        assert [(row.question, row.answer, dict(row.fields)) for row in found.rows] == [
            (row["question"], row["answer"], row) for row in ROWS
        ], path
    packed = examples(tmp_path / "packed.jsonl.gz").rows[0]
    assert packed.data_source == "packed"


def test_files_by_wildcards_and_what_is_no_file(tmp_path: Path) -> None:
    for i in range(3):
        tiny.write_jsonl(tmp_path / f"part-{i}.jsonl", [ROWS[i]])
    assert [row.question for row in examples(tmp_path / "part-*.jsonl").rows] == ["0?", "1?", "2?"]
    (tmp_path / "part-1.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"part-1.jsonl:1: not JSON"):
        examples(tmp_path / "part-*.jsonl")
    with pytest.raises(ValueError, match="No such file"):
        examples(tmp_path / "none-*.jsonl")
    with pytest.raises(ValueError, match="not a data set that datasets saved"):
        examples(tmp_path)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"broken\.parquet: "):
        examples(tmp_path / "broken.parquet")
