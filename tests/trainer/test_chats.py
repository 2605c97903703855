"""Chats with tools, reasoning, dates and templates that refuse: what fit and train make of them."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from rlprims.environments import parse_calls
from rlprims.fit.config import FitDataConfig
from rlprims.fit.rows import Reader
from rlprims.runs.rows import with_time
from rlprims.trainer.data import DataConfig, tokenized_prompt
from rlprims.turns.tokens import Chat, checked_messages, checked_tools
from tests.turns import chat_templates as templates
from tests.turns.tokenizers import tokenizer

ADD = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 12}}}
ASKED = [{"role": "user", "content": "12?"}]


def row_of(template: str, fields: dict[str, Any], *ends: str, **data: Any) -> Any:
    wrapped = tokenizer("byte-level", template, ends[0])
    config = FitDataConfig(train=Path("rows.jsonl"), **data)
    reader = Reader(config, "demonstrations", wrapped, wrapped.convert_tokens_to_ids(list(ends)), 10**6)
    reader.see(fields)
    row = reader.row(fields)
    (response,) = row.responses
    learned = [token for token, own in zip(response.ids, response.learned, strict=True) if own]
    return wrapped.decode(row.prompt_ids), wrapped.decode(response.ids), wrapped.decode(learned)


@pytest.mark.parametrize("tools", [[{"type": "function", "function": ADD}], [ADD], str([ADD]).replace("'", '"')])
def test_the_tools_of_a_row_reach_the_template(tools: Any) -> None:
    fields = {"messages": [*ASKED, {"role": "assistant", "content": "QX"}], "tools": tools}
    prompt, _, _ = row_of(templates.QWEN_TOOLS, fields, "<|im_end|>")
    assert '<tools>[{"type": "function", "function": {"name": "add"' in prompt
    wrapped = tokenizer("byte-level", templates.QWEN_TOOLS, "<|im_end|>")
    text, _ = tokenized_prompt(ASKED, DataConfig(train=Path("rows.jsonl")), wrapped, tools)
    assert text == prompt


@pytest.mark.parametrize("arguments", [{"a": 12}, '{"a": 12}'])
@pytest.mark.parametrize("content", [None, "", "QX"])
def test_calls_of_tools_are_learned_as_the_template_writes_them(arguments: Any, content: Any) -> None:
    """Arguments may be JSON text, as OpenAI writes them, and the content may be null."""
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    fields = {"messages": [*ASKED, {"role": "assistant", "content": content, "tool_calls": [call]}]}
    for template in (templates.QWEN_TOOLS, templates.QWEN_TOOLS.replace("m.content or ''", "m.content")):
        _, _, learned = row_of(template, fields, "<|im_end|>")
        assert (
            learned == (content or "") + '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call><|im_end|>'
        )


def test_keys_without_a_value_are_as_if_they_were_not_there() -> None:
    """As a table fills them in for messages that other rows have with calls."""
    template = "{% for m in messages %}{{ 'called' if 'tool_calls' in m else m.content }}{% endfor %}"
    messages = [*ASKED, {"role": "assistant", "content": "QX", "tool_calls": None, "name": None}]
    assert Chat(tokenizer("byte-level", template)).text(messages) == "12?QX"


def test_a_content_in_pieces_of_text_is_the_text() -> None:
    pieces = [{"type": "text", "text": "1"}, {"text": "2?"}]
    assert checked_messages([{"role": "user", "content": pieces}], "messages")
    chat = Chat(tokenizer("byte-level", templates.CHATML))
    assert chat.text([{"role": "user", "content": pieces}]) == chat.text(ASKED)


def test_a_template_that_cannot_read_null_gets_an_empty_content() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    template = "{% for m in messages %}{{ m.content.upper() + m.role }}{% endfor %}"
    assert Chat(tokenizer("byte-level", template)).text(messages) == "12?userassistant"


@pytest.mark.parametrize("arguments", ["[1, 2]", "{", "12", "NaN", '"a"'])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments }}{% endfor %}"
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert Chat(tokenizer("byte-level", template)).text(messages) == arguments


@pytest.mark.parametrize("check", [checked_messages, checked_tools])
def test_a_text_that_is_no_json_is_shown_and_a_long_one_in_part(check: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"^expected a list of .* got \"\[Q\"$"):
        check("[Q", "column")
    with pytest.raises(ValueError, match=r"got \"X{76}\.\.\.$"):
        check("X" * 100, "column")


def test_where_the_next_role_ends_a_message_every_answer_ends() -> None:
    """As in GLM's template: the model samples the tag of the next role."""
    messages = [*ASKED, {"role": "assistant", "content": "QX"}, *ASKED, {"role": "assistant", "content": "Z"}]
    _, response, learned = row_of(templates.GLM, {"messages": messages}, "<|endoftext|>", "<|user|>")
    assert response == "QX<|user|>\n12?<|assistant|>\nZ<|endoftext|>"
    assert learned == "QX<|user|>Z<|endoftext|>"


def test_an_answer_with_an_end_in_its_text_is_whole() -> None:
    messages = [*ASKED, {"role": "assistant", "content": "Q<|im_end|>X"}, *ASKED, {"role": "assistant", "content": "Z"}]
    _, _, learned = row_of(templates.CHATML, {"messages": messages}, "<|im_end|>")
    assert learned == "Q<|im_end|>X<|im_end|>Z<|im_end|>"
    messages[-1] = {"role": "assistant", "content": "Z<|im_end|>"}
    _, _, learned = row_of(templates.CHATML, {"messages": messages}, "<|im_end|>")
    assert learned.endswith("Z<|im_end|>")
    assert not learned.endswith("Z<|im_end|><|im_end|>")


@pytest.mark.parametrize("turns", ["all", "last"])
def test_a_prompt_that_opens_a_thought_which_the_answer_does_not_have(turns: str) -> None:
    """As in DeepSeek-R1's template."""
    end = "<｜end▁of▁sentence｜>"
    messages = [*ASKED, {"role": "assistant", "content": "QX"}, *ASKED, {"role": "assistant", "content": "Z"}]
    prompt, _, learned = row_of(templates.DEEPSEEK_REASONING, {"messages": messages}, end, turns=turns)
    assert prompt.endswith("<｜Assistant｜>")
    assert learned == (f"QX{end}Z{end}" if turns == "all" else f"Z{end}")


def test_reasoning_that_the_template_leaves_out_is_refused() -> None:
    messages = [*ASKED, {"role": "assistant", "content": "<think>\nX\n</think>\n\nQ"}]
    with pytest.raises(ValueError, match="leaves out the reasoning of message 1"):
        row_of(templates.DEEPSEEK_REASONING, {"messages": messages}, "<｜end▁of▁sentence｜>")


def test_arguments_of_the_template() -> None:
    fields = {"messages": [*ASKED, {"role": "assistant", "content": "QX"}]}
    how = {"enable_thinking": False}
    prompt, _, learned = row_of(templates.QWEN_3, fields, "<|im_end|>", template_arguments=how)
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert learned == "QX<|im_end|>"
    wrapped = tokenizer("byte-level", templates.QWEN_3, "<|im_end|>")
    config = DataConfig(train=Path("rows.jsonl"), template="chat", template_arguments=how)
    assert tokenized_prompt("12?", config, wrapped)[0] == prompt


def test_the_date_of_a_template_is_that_of_the_run() -> None:
    """A run that is resumed on another day renders the same prompts."""
    wrapped = tokenizer("byte-level", templates.LLAMA_3_DATE, "<|eot_id|>")
    config = DataConfig(train=Path("rows.jsonl"), template="chat", time=datetime(2024, 7, 26, 12))
    text, _ = tokenized_prompt("12?", config, wrapped)
    assert "Today Date: 26 Jul 2024\n" in text

    class Run:
        def __init__(self, data: DataConfig) -> None:
            self.data = data

        def model_copy(self, update: dict[str, Any]) -> "Run":
            return Run(**update)

    begun = with_time(Run(config.model_copy(update={"time": None})))
    assert begun.data.time is not None
    assert with_time(begun) is begun
    again = DataConfig.model_validate(begun.data.model_dump(mode="json"))
    assert again.time == begun.data.time


def test_calls_with_the_names_of_llama_3_1_and_numbers_that_no_float_holds() -> None:
    def text(arguments: str) -> str:
        return f'<tool_call>{{"name": "add", {arguments}}}</tool_call>'

    (call,) = parse_calls(text('"parameters": {"a": 1}')).calls
    assert call.arguments == {"a": 1}
    assert parse_calls(text('"arguments": {"a": 1e999}')).malformed == [
        "1e999 is larger than any float: write it as text"
    ]


def test_pairs_of_chats_share_what_was_said_before() -> None:
    wrapped = tokenizer("byte-level", templates.CHATML, "<|im_end|>")
    config = FitDataConfig(train=Path("rows.jsonl"))
    reader = Reader(config, "pairs", wrapped, wrapped.convert_tokens_to_ids(["<|im_end|>"]), 10**6)
    said = [*ASKED, {"role": "assistant", "content": "QX"}, *ASKED]
    good, bad = ({"role": "assistant", "content": text} for text in ("Z", "J"))
    rows = [
        {"prompt": said, "chosen": [good], "rejected": [bad]},
        {"chosen": [*said, good], "rejected": [*said, bad]},
        {"prompt": "12?", "chosen": [*said, good], "rejected": [*said, bad]},
    ]
    for row in rows:
        reader.see(row)
        found = reader.row(row)
        assert wrapped.decode(found.prompt_ids).endswith(
            "assistant\nQX<|im_end|>\n<|im_start|>user\n12?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert [wrapped.decode(each.ids) for each in found.responses] == ["Z<|im_end|>", "J<|im_end|>"]
    other = [{"role": "user", "content": "34?"}]
    reader.see(rows[1])
    with pytest.raises(ValueError, match="differ before an answer"):
        reader.row({"chosen": [*said, good], "rejected": [*said[:-1], *other, bad]})
