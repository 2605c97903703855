"""``delta_ids``: what follows a sampled message, for ten templates and three tokenizers."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlprims.turns import Turn, delta_ids, explain, merge
from tests.turns.chat_templates import (
    CHATML,
    DEEPSEEK_REASONING,
    END_OF_CHAT,
    FAMILIES,
    byte_tokenizer,
    metaspace_tokenizer,
)

WORDS = Path(__file__).parents[2] / "examples" / "words"
QUESTION = {"role": "user", "content": "12 + 30 = what?"}
ANSWER = {"role": "assistant", "content": "HAVING seven, the answer is 42."}
THOUGHT = {"role": "assistant", "content": "<think>\nlet me see\n</think>\n\nthe answer is 42."}
CALL = {
    "role": "assistant",
    "content": "let me see",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 12}}}],
}
TOOL = {"role": "tool", "content": "42"}
MORE = {"role": "user", "content": "and the way to 7?"}


def render(tokenizer: Any, chat: list[Any], generate: bool, **options: Any) -> str:
    text: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=generate, **options)
    return text


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def check_law(tokenizer: Any, chat: list[Any], appended: list[Any], end: str, **options: Any) -> list[int]:
    """If the sampler wrote what the template writes: ids of the whole = ids up to the sampled end token + delta."""
    whole = render(tokenizer, [*chat, *appended], True, **options)
    until = render(tokenizer, chat, False, **options)
    until = until[: until.rindex(end) + len(end)] if end else until.rstrip("\n")
    delta = delta_ids(tokenizer, chat, appended, ended=bool(end), **options)
    assert delta is not None
    assert encode(tokenizer, until) + delta == encode(tokenizer, whole)
    assert tokenizer.decode(encode(tokenizer, until) + delta) == tokenizer.decode(encode(tokenizer, whole))
    return delta


@pytest.mark.parametrize(
    ("name", "appended"),
    [
        (name, appended)
        for name in FAMILIES
        for appended in ([MORE], [TOOL], [TOOL, TOOL], [TOOL, MORE])
        if name != "qwen thinking" or MORE not in appended  # a question removes the reasoning before it: see below
    ],
    ids=str,
)
def test_the_delta_continues_the_conversation(name: str, appended: list[Any]) -> None:
    answer = THOUGHT if name == "qwen thinking" else ANSWER
    check_law(byte_tokenizer(name), [QUESTION, answer], appended, FAMILIES[name].end)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_longer_history_and_a_system_message(name: str) -> None:
    chat = [{"role": "system", "content": "You help."}, QUESTION, ANSWER, MORE, ANSWER]
    answers = [THOUGHT] if name == "qwen thinking" else [ANSWER]
    check_law(byte_tokenizer(name), [*chat[:-1], *answers], [TOOL], FAMILIES[name].end)


@pytest.mark.parametrize("name", ["qwen tools", "llama 3"])
def test_a_call_of_a_tool(name: str) -> None:
    schema = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    check_law(byte_tokenizer(name), [QUESTION, CALL], [TOOL], FAMILIES[name].end, tools=schema)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_that_was_cut_is_closed(name: str) -> None:
    """finish="length": the token that ends the turn was not sampled, so the environment's tokens begin with it."""
    tokenizer, end = byte_tokenizer(name), FAMILIES[name].end
    answer = THOUGHT if name == "qwen thinking" else ANSWER
    whole = delta_ids(tokenizer, [QUESTION, answer], [TOOL], ended=False)
    rest = delta_ids(tokenizer, [QUESTION, answer], [TOOL])
    assert whole is not None
    assert rest is not None
    assert whole == encode(tokenizer, end) + rest


def test_the_newline_after_the_end_token_is_kept_verl_6921() -> None:
    """The sampler stops at <|im_end|>; the template writes a newline after it, which peers dropped at each border."""
    tokenizer = byte_tokenizer("chatml")
    delta = check_law(tokenizer, [QUESTION, ANSWER], [TOOL], "<|im_end|>")
    assert tokenizer.decode(delta).startswith("\n<|im_start|>tool")


def test_consecutive_answers_of_tools_are_one_turn_slime_2264() -> None:
    tokenizer = byte_tokenizer("qwen tools")
    delta = check_law(tokenizer, [QUESTION, CALL], [TOOL, {"role": "tool", "content": "7"}], "<|im_end|>")
    text = tokenizer.decode(delta)
    assert text.count("<|im_start|>user") == 1
    assert text.count("<tool_response>") == 2


def test_reasoning_that_the_template_removes_is_no_delta_slime_2213() -> None:
    """Another question of the user removes the reasoning before it: the row cannot be continued, a new one opens."""
    tokenizer = byte_tokenizer("qwen thinking")
    assert delta_ids(tokenizer, [QUESTION, THOUGHT], [MORE]) is None
    assert delta_ids(tokenizer, [QUESTION, THOUGHT], [TOOL]) is not None
    separate = {"role": "assistant", "content": "the answer", "reasoning_content": "let me see"}
    assert delta_ids(tokenizer, [QUESTION, separate], [TOOL]) is not None
    assert delta_ids(byte_tokenizer("chatml"), [QUESTION, separate], [TOOL]) is None  # it knows no such key

    first = encode(tokenizer, render(tokenizer, [QUESTION], True))
    sampled = encode(tokenizer, THOUGHT["content"] + "<|im_end|>")
    second = encode(tokenizer, render(tokenizer, [QUESTION, THOUGHT, MORE], True))
    rows = merge([Turn(first, sampled, [0.0] * len(sampled)), Turn(second, [5], [0.0])])
    assert len(rows) == 2
    reason = explain(rows[0], Turn(second, [5], [0.0]), tokenizer)
    assert reason.kind == "own token"
    assert "think" in reason.expected


def test_reasoning_that_is_never_shown_is_no_delta() -> None:
    tokenizer = byte_tokenizer("deepseek chat")
    tokenizer.chat_template = DEEPSEEK_REASONING
    assert delta_ids(tokenizer, [QUESTION, THOUGHT], [MORE]) is None
    assert delta_ids(tokenizer, [QUESTION, ANSWER], [MORE]) is not None


def test_an_end_of_the_conversation_is_no_delta() -> None:
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = END_OF_CHAT
    assert delta_ids(tokenizer, [QUESTION, ANSWER], [MORE]) is None


def test_a_number_of_messages_in_the_head_is_no_delta() -> None:
    """A template that writes at the front what depends on the messages after it."""
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = "{{ messages | length }} messages\n" + CHATML
    assert delta_ids(tokenizer, [QUESTION, ANSWER], [MORE]) is None


def test_chat_turns_never_tokenize_what_was_sampled_trl_6250() -> None:
    """Not its text, not the history: the work of a turn is that of its new messages."""
    tokenizer = byte_tokenizer("qwen tools")
    texts: list[str] = []

    class Spy:
        all_special_tokens = tokenizer.all_special_tokens
        added_tokens_decoder = tokenizer.added_tokens_decoder
        apply_chat_template = staticmethod(tokenizer.apply_chat_template)

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            texts.append(text)
            return encode(tokenizer, text)

    long = {"role": "user", "content": "one way " * 1000}
    assert delta_ids(Spy(), [long, ANSWER], [TOOL]) == delta_ids(tokenizer, [QUESTION, ANSWER], [TOOL])
    assert not any("HAVING" in text or "one way" in text for text in texts)
    assert sum(map(len, texts)) < 200


def test_ids_that_no_tokenizer_would_choose_are_kept() -> None:
    """A sampler may write HAV|ING where the tokenizer writes HAVING: a second tokenization breaks the prefix."""
    tokenizer = byte_tokenizer("chatml")
    prompt = encode(tokenizer, render(tokenizer, [QUESTION], True))
    sampled = encode(tokenizer, "HAV") + encode(tokenizer, "ING") + encode(tokenizer, "<|im_end|>")
    chat = [QUESTION, {"role": "assistant", "content": "HAVING"}]
    canonical = encode(tokenizer, "HAVING<|im_end|>")
    assert sampled != canonical
    delta = delta_ids(tokenizer, chat, [TOOL])
    assert delta is not None
    first = Turn(prompt, sampled, [-0.1] * len(sampled))
    assert len(merge([first, Turn([*first.token_ids, *delta], [5], [-0.2])])) == 1

    again = Turn(encode(tokenizer, render(tokenizer, [*chat, TOOL], True)), [5], [-0.2])
    assert len(merge([first, again])) == 2
    with pytest.raises(ValueError, match=r"turn 1 does not continue turn 0: .* in a token that was sampled"):
        merge([first, again], strict=True)
    reason = explain(first, again, tokenizer)
    assert (reason.kind, reason.position) == ("own token", len(prompt))
    assert reason.expected.startswith("'HAVING")
    assert reason.got.startswith("'HAVING")


@pytest.mark.parametrize("name", ["zephyr", "mistral"])
def test_a_tokenizer_that_begins_texts_with_a_space(name: str) -> None:
    tokenizer = metaspace_tokenizer(name)
    assert encode(tokenizer, "the answer")[0] == tokenizer.convert_tokens_to_ids("▁the")
    check_law(tokenizer, [QUESTION, ANSWER], [MORE], "</s>")


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(WORDS))
    spec = importlib.util.spec_from_file_location("words_tokenizer", WORDS / "tokenizer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("words", None)


def test_the_words_tokenizer(words: ModuleType) -> None:
    tokenizer = words.build_tokenizer(128)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    chat = [
        {"role": "user", "content": "Bob has 19 apples. How many?"},
        {"role": "assistant", "content": "<think>19</think><answer>19</answer>"},
    ]
    more = [{"role": "user", "content": "Eve eats 2 figs. How many?"}]
    delta = check_law(tokenizer, chat, more, "<eos>")
    assert tokenizer.decode(delta) == "Eve eats 2 figs. How many?<eos>"


def test_a_turn_that_ends_with_two_tokens() -> None:
    """The sampler stops at the first; the template's second one is the environment's."""
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<|im_end|><|end|>")
    delta = check_law(tokenizer, [QUESTION, ANSWER], [MORE], "<|im_end|>")
    assert tokenizer.decode(delta).startswith("<|end|>\n<|im_start|>user")


def test_an_end_token_that_only_the_vocabulary_calls_special() -> None:
    """As in Llama 3, where neither all_special_tokens nor the end of the sequence names the end of a turn."""
    tokenizer = byte_tokenizer("llama 3")
    tokenizer.eos_token = "<|endoftext|>"
    assert "<|eot_id|>" not in tokenizer.all_special_tokens
    delta = check_law(tokenizer, [QUESTION, ANSWER], [MORE], "<|eot_id|>")
    assert tokenizer.decode(delta).startswith("<|start_header_id|>user")


def test_a_call_that_ends_in_another_way_is_no_delta() -> None:
    """A template that ends calls with one token and answers with another: which one was sampled is not known."""
    tokenizer = byte_tokenizer("qwen tools")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% endfor %}<|im_end|>\n", "{% endfor %}{{ '<|end|>' if m.tool_calls else '<|im_end|>\n' }}"
    )
    assert delta_ids(tokenizer, [QUESTION, ANSWER], [TOOL]) is not None
    assert delta_ids(tokenizer, [QUESTION, CALL], [TOOL]) is None


def test_a_token_may_not_cross_the_border() -> None:
    """The tokenizer would write the end of the answer and the newline as one id; the answer is sampled already."""

    class Merging:
        all_special_tokens: tuple[str, ...] = ()

        def apply_chat_template(self, messages: list[Any], *, add_generation_prompt: bool, **_: Any) -> str:
            return "".join(f"{m['content']}\n" for m in messages)

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [ord(c) for c in text.replace(".\n", "!")]

    assert Merging().encode("a.\nb", add_special_tokens=False) == [ord(c) for c in "a!b"]
    assert delta_ids(Merging(), [QUESTION, ANSWER], [{"role": "user", "content": "b"}]) == [ord(c) for c in "\nb\n"]


def test_options_of_the_template() -> None:
    tokenizer = byte_tokenizer("qwen thinking")
    delta = delta_ids(tokenizer, [QUESTION, THOUGHT], [TOOL], enable_thinking=False)
    assert delta is not None
    assert tokenizer.decode(delta).endswith("assistant\n<think>\n\n</think>\n\n")


def test_bad_input() -> None:
    tokenizer = byte_tokenizer("chatml")
    for chat in ([], [QUESTION], [QUESTION, ANSWER, TOOL]):
        with pytest.raises(ValueError, match="last of messages is not the assistant's"):
            delta_ids(tokenizer, chat, [TOOL])
    with pytest.raises(ValueError, match="appended is empty"):
        delta_ids(tokenizer, [QUESTION, ANSWER], [])
