"""Rows become prompts, or an error that names file and line."""

from pathlib import Path
from typing import Any

import pytest

from rlprims.runs.rows import RowOrder
from rlprims.trainer.data import DataConfig, load_examples
from tests import tiny

GSM8K = Path(__file__).parent / "gsm8k_sample.jsonl"


def read(path: Path, limit: int = 50, **settings: Any) -> Any:
    return load_examples(path, DataConfig(train=path, **settings), tiny.tokenizer(), max_prompt_length=limit)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "nothing to train on: it has no rows"),
        ('{"question": "1+1=", "answer": "2"}\n{"question": "1+', "rows.jsonl:2: not JSON"),
        ('{"question": "1+1=", "answer": "2"}\n\n[1]', "rows.jsonl:3: expected an object"),
        ('{"question": "1+1="}', r"rows.jsonl:1: field 'answer' is missing; the row has \['question'\]"),
        ('{"question": null, "answer": "2"}', "field 'question' is None"),
        ('{"question": ["1"], "answer": "2"}', "expected text or a number"),
        ('{"question": "", "answer": "2"}', "field 'question' is ''"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=expected):
        read(path)


def test_a_missing_file_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9"}')
    with pytest.raises(ValueError, match="not UTF-8 at byte 14"):
        read(tmp_path / "latin.jsonl")


def test_a_line_separator_inside_a_string_does_not_end_the_row(tmp_path: Path) -> None:
    path = tiny.write_jsonl(tmp_path / "rows.jsonl", [])
    path.write_text('{"question": "a\u2028b", "answer": 3}\n', encoding="utf-8")
    (row,) = read(path).rows
    assert (row.prompt, row.answer) == ("a\u2028b", "3")


def test_prompts_longer_than_the_limit(tmp_path: Path) -> None:
    path = tiny.write_jsonl(tmp_path / "r.jsonl", [{"question": q, "answer": "1"} for q in ("1+1=", "11111+1=")])
    kept = read(path, 5)
    assert ([row.prompt for row in kept.rows], kept.filtered, kept.truncated) == (["1+1="], 1, 0)
    cut = read(path, 5, overlong_prompts="truncate")
    assert ([len(row.prompt_ids) for row in cut.rows], cut.filtered, cut.truncated) == ([4, 5], 0, 1)
    assert tiny.tokenizer().decode(cut.rows[1].prompt_ids) == "111+1="[-5:]
    with pytest.raises(ValueError, match=r"r.jsonl:2: the prompt has 8 tokens, the limit is 5"):
        read(path, 5, overlong_prompts="error")
    with pytest.raises(ValueError, match="all 2 prompts are longer than 2 tokens"):
        read(path, 2)


def test_templates(tmp_path: Path) -> None:
    path = tiny.write_jsonl(tmp_path / "r.jsonl", [{"q": "{1}", "a": 2, "question": "no"}])
    (row,) = read(path, question="q", answer="a", template="ab {question} =").rows
    assert row.prompt == "ab {1} ="
    assert (row.answer, row.data_source) == ("2", "r")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
    config = DataConfig(train=path, question="q", answer="a", template="chat", system="be brief")
    (chat,) = load_examples(path, config, tokenizer, max_prompt_length=50).rows
    assert chat.prompt == "s:be brief;u:{1};a:"


def test_real_rows_of_gsm8k() -> None:
    tokenizer = _bpe()
    config = DataConfig(train=GSM8K)
    whole = load_examples(GSM8K, config, tokenizer, max_prompt_length=10_000)
    assert len(whole.rows) == 24
    assert all("####" in row.answer for row in whole.rows)
    assert all(tokenizer.decode(row.prompt_ids) == row.prompt for row in whole.rows)
    lengths = sorted(len(row.prompt_ids) for row in whole.rows)
    limit = lengths[12]
    some = load_examples(GSM8K, config, tokenizer, max_prompt_length=limit)
    assert len(some.rows) + some.filtered == 24
    assert some.filtered == sum(length > limit for length in lengths)


def _bpe() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train([str(GSM8K)], trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=model)


def test_every_epoch_sees_every_example_once_in_an_order_of_its_own() -> None:
    order = RowOrder(10, seed=3, shuffle=True)
    epochs = [order.take(10) for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert RowOrder(10, seed=4, shuffle=True).take(10) != epochs[0]
    assert RowOrder(4, seed=0, shuffle=False).take(6) == [0, 1, 2, 3, 0, 1]


def test_the_position_is_the_whole_state() -> None:
    order = RowOrder(7, seed=1, shuffle=True)
    taken = [*order.take(5), *order.take(9)]
    again = RowOrder(7, seed=1, shuffle=True)
    again.position = 5
    assert again.take(9) == taken[5:]


@pytest.mark.parametrize(
    ("answer", "read_as"), [(72, "72"), (0.5, "0.5"), ([1, "b"], [1, "b"]), ({"a": 1}, {"a": 1}), (True, True)]
)
def test_answers_of_any_kind_and_all_fields(tmp_path: Path, answer: object, read_as: object) -> None:
    path = tiny.write_jsonl(tmp_path / "r.jsonl", [{"question": "1+1=", "answer": answer, "level": [3]}])
    (row,) = read(path).rows
    assert (row.answer, row.fields["level"]) == (read_as, [3])
