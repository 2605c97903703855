"""Stored rows become token ids as a policy would read and write them, and a bad row is named with file and line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlprims.execution import Kind
from rlprims.fit.config import FitDataConfig
from rlprims.fit.rows import Reader, StoredRows, as_batch
from tests import tiny

CHAT = (
    "{% for m in messages %}{{ 'b' if m['role'] == 'user' else 'c' }}{{ m['content'] }}{{ eos_token }}{{ ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}c{% endif %}"
)
"""A letter for who speaks, the text, the end of sequence, a space."""

Read = Callable[..., StoredRows]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read(*rows: Any, kind: Kind = "demonstrations", window: int = 64, chat: str | None = None, **data: Any) -> Any:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template = chat
        config = FitDataConfig(train=path, **data)
        return Reader(config, kind, tokenizer, [tiny.EOS_ID], window).read(path)

    return read


def text(ids: list[int]) -> str:
    return tiny.tokenizer().decode(ids)


def learned(row: Any) -> list[str]:
    """The response's pieces, those that are learned in brackets."""
    (response,) = row.responses
    tokens = [text([token]) for token in response.ids]
    return [f"[{token}]" if own else token for token, own in zip(tokens, response.learned, strict=True)]


def test_a_demonstration_is_a_prompt_and_a_response_that_ends(read: Read) -> None:
    (row,) = read({"prompt": "1+2=", "response": "3"}, template="a{prompt}").rows
    assert text(row.prompt_ids) == "a1+2="
    assert learned(row) == ["[3]", "[<eos>]"]


def test_fit_rows_with_other_names_of_the_fields(read: Read) -> None:
    (row,) = read({"question": "1+2=", "answer": "3"}, prompt="question", response="answer").rows
    assert (text(row.prompt_ids), learned(row)[0]) == ("1+2=", "[3]")


def test_of_a_chat_the_assistants_messages_are_learned_up_to_their_ends(read: Read) -> None:
    said = [("user", "1+2="), ("assistant", "3"), ("user", "2+2="), ("assistant", "4")]
    messages = [{"role": role, "content": content} for role, content in said]
    (row,) = read({"messages": messages}, chat=CHAT).rows
    assert text(row.prompt_ids) == "b1+2=<eos> c"
    assert "".join(learned(row)) == "[3][<eos>] b2+2=<eos> c[4][<eos>]"
    whole = tiny.tokenizer()
    whole.chat_template = CHAT
    assert text(row.prompt_ids + row.responses[0].ids) + " " == whole.apply_chat_template(messages, tokenize=False)
    (last,) = read({"messages": messages}, chat=CHAT, turns="last").rows
    assert text(last.prompt_ids) == "b1+2=<eos> c3<eos> b2+2=<eos> c"
    assert learned(last) == ["[4]", "[<eos>]"]


def test_a_prompt_in_the_chat_template_is_what_the_policy_is_asked(read: Read) -> None:
    (row,) = read({"prompt": "1+2=", "response": "3"}, chat=CHAT, template="chat", system="a").rows
    assert text(row.prompt_ids) == "ca<eos> b1+2=<eos> c"
    assert learned(row) == ["[3]", "[<eos>]"]


def test_a_template_that_closes_no_message_still_ends_the_response(read: Read) -> None:
    (row,) = read({"prompt": "1+2=", "response": "3"}, chat=CHAT.replace("{{ eos_token }}", ""), template="chat").rows
    assert learned(row) == ["[3]", "[ ]", "[<eos>]"]


def test_a_template_that_forgets_is_refused(read: Read) -> None:
    """Such as one that leaves out what the assistant thought in earlier turns."""
    forgets = "{% for m in messages[-2:] %}{{ m['content'] }} {% endfor %}"
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": str(number)} for number, role in enumerate(roles)]
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the chat template changes earlier messages .*turns: last"):
        read({"messages": messages}, chat=forgets)


def test_a_pair_shares_its_prompt(read: Read) -> None:
    (row,) = read({"prompt": "1+2=", "chosen": "3", "rejected": "4a", "gap": 0.5}, kind="pairs", margin="gap").rows
    assert [text(response.ids) for response in row.responses] == ["3<eos>", "4a<eos>"]
    assert row.margin == 0.5


def test_fit_rows_that_are_too_long_are_cut_left_out_or_refused(read: Read) -> None:
    rows = [{"prompt": "1" * 9, "response": "2" * n} for n in (3, 7)] + [{"prompt": "1" * 16, "response": "2"}]
    cut = read(*rows, window=16)
    assert [(len(row.prompt_ids), learned(row)[-1]) for row in cut.rows] == [(9, "[<eos>]"), (9, "[2]")]
    assert (cut.filtered, cut.truncated) == (1, 1)
    dropped = read(*rows, max_length=16, overlong_rows="filter")
    assert (len(dropped.rows), dropped.filtered, dropped.truncated) == (1, 2, 0)
    with pytest.raises(ValueError, match=r"rows.jsonl:2: expected a row of at most 16 tokens, got 17"):
        read(*rows, window=16, overlong_rows="error")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: expected a prompt of at most 8 tokens, got 9"):
        read(*rows, max_prompt_length=8, overlong_prompts="error")
    with pytest.raises(ValueError, match=r"nothing to train on: 3 rows are too long"):
        read(*rows, max_prompt_length=8)


def test_pairs_of_equal_responses_are_left_out(read: Read) -> None:
    rows = [{"prompt": "1", "chosen": "2", "rejected": each} for each in ("2", "3")]
    found = read(*rows, kind="pairs")
    assert (len(found.rows), found.equal) == (1, 1)


GOOD = {"prompt": "1", "response": "2", "chosen": "3", "rejected": "4"}


@pytest.mark.parametrize(
    ("row", "kind", "message"),
    [
        (GOOD | {"chosen": None}, "pairs", "expected a text in 'chosen', got null"),
        (GOOD | {"rejected": ["4"]}, "scores", "expected a text in 'rejected', got [\"4\"]"),
        (GOOD | {"response": 4}, "demonstrations", "expected a text in 'response', got 4"),
        ({"prompt": "1"}, "demonstrations", "expected a text in 'response', and the row has ['prompt']"),
        (GOOD | {"prompt": ""}, "demonstrations", "the prompt is empty"),
        ({"messages": []}, "demonstrations", "expected a list of messages in 'messages', got []"),
        ({"messages": ["hi"]}, "demonstrations", 'expected a text in role and content of messages[0], got "hi"'),
        ({"messages": [{"role": "user", "content": "1"}]}, "demonstrations", "a chat, but the tokenizer has no chat"),
        ("[1]", "demonstrations", "expected an object with fields, got list"),
        ("{", "demonstrations", "not JSON"),
    ],
)
def test_a_bad_row_is_named(read: Read, row: Any, kind: Kind, message: str) -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl:3: ") as error:
        read(GOOD, GOOD, row, kind=kind)
    assert message in str(error.value)


def test_fit_refuses_a_chat_that_does_not_end_with_the_assistant(read: Read) -> None:
    with pytest.raises(ValueError, match=r"rows.jsonl:1: expected a chat that .* ends with assistant, got \['user'\]"):
        read({"messages": [{"role": "user", "content": "1"}]}, chat=CHAT)
    with pytest.raises(ValueError, match=r"rows.jsonl:1: expected a number in 'gap', got null"):
        read(GOOD, kind="scores", margin="gap")


def test_the_columns_of_a_batch(read: Read) -> None:
    rows = read(GOOD, GOOD | {"prompt": "11", "chosen": "333"}, kind="pairs").rows
    batch = as_batch(rows, tiny.PAD_ID)
    assert [text(row) for row in batch["prompts"].tolist()] == ["<pad>1", "<pad>1", "11", "11"]
    ends = ["3<eos><pad><pad>", "4<eos><pad><pad>", "333<eos>", "4<eos><pad><pad>"]
    assert [text(row) for row in batch["responses"].tolist()] == ends
    is_padding = torch.cat([batch["prompts"], batch["responses"]], 1) == tiny.PAD_ID
    assert torch.equal(batch["attention_mask"], ~is_padding)
    assert torch.equal(batch["response_mask"], batch["responses"] != tiny.PAD_ID)
    assert batch["pair_ids"].tolist() == [0, 0, 1, 1]
    assert batch["is_chosen"].tolist() == [True, False, True, False]
