"""The law of text to tokens, for sixteen tokenizers and eighteen templates.

The ids that a run trains on are the ids of the whole rendered text, every one once, and every learned token was written
by the assistant. Users write digits, the assistant writes the letters Q, X, Z and J, and templates write neither.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlprims.environments import ChatRenderer, TextRenderer
from rlprims.fit.config import FitDataConfig
from rlprims.fit.rows import Reader
from rlprims.trainer.data import DataConfig, tokenized_prompt
from rlprims.turns.tokens import text_ids
from tests.turns import chat_templates as templates
from tests.turns.tokenizers import BOS, EOS, TOKENIZERS, tokenizer


class Family(NamedTuple):
    """A template and its facts."""

    template: str
    ends: tuple[str, ...]
    """The tokens that end an answer."""
    opens: tuple[str, ...] = ()
    """Other special tokens that the assistant writes."""
    system: bool = True
    changes: bool = False
    """Whether it writes an answer in another way when messages follow."""
    arguments: dict[str, Any] = {}  # noqa: RUF012


FAMILIES = {
    "chatml": Family(templates.CHATML, ("<|im_end|>",)),
    "hermes tools": Family(templates.QWEN_TOOLS, ("<|im_end|>",)),
    "llama 2": Family(templates.LLAMA_2, ("</s>",)),
    "llama 3": Family(templates.LLAMA_3, ("<|eot_id|>",)),
    "llama 3 with tools and date": Family(templates.LLAMA_3_DATE, ("<|eot_id|>",)),
    "mistral": Family(templates.MISTRAL, ("</s>",)),
    "mistral tools": Family(templates.MISTRAL_TOOLS, ("</s>",)),
    "gemma 2": Family(templates.GEMMA_2, ("<end_of_turn>",), system=False),
    "gemma 3": Family(templates.GEMMA_3, ("<end_of_turn>",)),
    "phi": Family(templates.PHI, ("<|end|>",)),
    "zephyr": Family(templates.ZEPHYR, ("</s>",)),
    "deepseek": Family(templates.DEEPSEEK_CHAT, ("<｜end▁of▁sentence｜>",)),
    "deepseek r1": Family(templates.DEEPSEEK_REASONING, ("<｜end▁of▁sentence｜>",)),
    "qwen 3": Family(templates.QWEN_3, ("<|im_end|>",), changes=True),
    "qwen 3 without thinking": Family(
        templates.QWEN_3, ("<|im_end|>",), changes=True, arguments={"enable_thinking": False}
    ),
    "glm": Family(templates.GLM, ("<|endoftext|>", "<|user|>", "<|observation|>")),
    "command-r": Family(templates.COMMAND_R, ("<|END_OF_TURN_TOKEN|>",)),
    "gpt-oss": Family(templates.GPT_OSS, ("<|return|>", "<|end|>"), ("<|channel|>", "<|message|>"), changes=True),
    "plain": Family(templates.PLAIN, ("<|endoftext|>",)),
}

spaces = st.sampled_from(["", " ", "\n", "\n\n"])


def texts(alphabet: str) -> st.SearchStrategy[str]:
    words = st.lists(st.text(alphabet, min_size=1, max_size=5), min_size=1, max_size=3)
    return st.builds(lambda a, w, by, b: a + by.join(w) + b, spaces, words, st.sampled_from([" ", "\n", ", "]), spaces)


@st.composite
def conversations(draw: Any) -> list[dict[str, Any]]:
    first = [{"role": "system", "content": draw(texts("0123456789"))}] if draw(st.booleans()) else []
    rounds = draw(st.integers(1, 3))
    pairs = [(draw(texts("0123456789")), draw(texts("QXZJ"))) for _ in range(rounds)]
    return first + [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def reader_of(family: Family, wrapped: Any, **data: Any) -> Reader:
    config = FitDataConfig(train=Path("rows.jsonl"), template_arguments=family.arguments, **data)
    ends = wrapped.convert_tokens_to_ids(list(family.ends))
    return Reader(config, "demonstrations", wrapped, ends, 10**6)


def has_spaces_at_ends(messages: list[dict[str, Any]]) -> bool:
    return any(m["content"] != m["content"].strip() for m in messages)


def is_assistants(wrapped: Any, token: int, family: Family) -> bool:
    return bool(set(wrapped.convert_ids_to_tokens(token)) & set("QXZJ")) and token not in wrapped.all_special_ids


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_stored_chats(name: str, family: str) -> None:
    facts = FAMILIES[family]
    wrapped = tokenizer(name, facts.template, facts.ends[0])
    special = set(wrapped.convert_tokens_to_ids(templates.SPECIAL))
    allowed = set(wrapped.convert_tokens_to_ids([*facts.ends, *facts.opens]))
    readers = {turns: reader_of(facts, wrapped, turns=turns) for turns in ("all", "last")}

    @settings(max_examples=6)
    @given(conversations(), st.sampled_from(["all", "last"]))
    def law(messages: list[dict[str, Any]], turns: str) -> None:
        if not facts.system:
            messages = [m for m in messages if m["role"] != "system"]
        row = {"messages": messages}
        answers = [m for m in messages if m["role"] == "assistant"]
        readers[turns].see(row)
        if facts.changes and turns == "all" and len(answers) > 1:
            with pytest.raises(ValueError, match=r"changes earlier messages .*turns: last"):
                readers[turns].row(row)
            return
        found = readers[turns].row(row)
        (response,) = found.responses
        ids = found.prompt_ids + response.ids
        learned = [False] * len(found.prompt_ids) + response.learned
        text = wrapped.apply_chat_template(messages, tokenize=False, **facts.arguments)
        whole = wrapped.encode(text, add_special_tokens=False)

        # Every id of the whole text once, up to the end of the last answer, which may be added.
        assert ids[-1] in allowed
        body = ids if ids == whole[: len(ids)] else ids[:-1]
        if body != whole[: len(body)]:  # a token would cross the border between two speakers
            assert has_spaces_at_ends(messages)
            assert wrapped.decode(whole).startswith(wrapped.decode(body).rstrip())
        # Learned: what the assistant wrote, its ends, and nothing that others or the template wrote.
        which = answers if turns == "all" else answers[-1:]
        for token, own in zip(ids, learned, strict=True):
            if own:
                assert not set(wrapped.convert_ids_to_tokens(token)) & set("0123456789")
                assert token not in special or token in allowed
            elif turns == "all":
                assert not is_assistants(wrapped, token, facts)
        assert sum(
            own and token in set(readers[turns].end_ids) for token, own in zip(ids, learned, strict=True)
        ) == len(which)
        letters = "".join(
            wrapped.convert_ids_to_tokens([t for t, own in zip(ids, learned, strict=True) if own and t not in special])
        )
        assert [c for c in letters if c in "QXZJ"] == [c for m in which for c in m["content"] if c in "QXZJ"]

    law()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_prompts_of_runs_and_environments(name: str, family: str) -> None:
    """A prompt is the same in a run, an evaluation and an environment, and what a stored row has before its answer."""
    facts = FAMILIES[family]
    wrapped = tokenizer(name, facts.template, facts.ends[0])
    config = DataConfig(train=Path("rows.jsonl"), template_arguments=facts.arguments)
    renderer = ChatRenderer(wrapped, **facts.arguments)
    reader = reader_of(facts, wrapped, turns="last")

    @settings(max_examples=4)
    @given(conversations())
    def law(messages: list[dict[str, Any]]) -> None:
        if not facts.system:
            messages = [m for m in messages if m["role"] != "system"]
        asked, last = messages[:-1], messages[-1]
        text, ids = tokenized_prompt(asked, config, wrapped)
        assert ids == wrapped.encode(text, add_special_tokens=False)
        assert ids == renderer.prompt(asked, [])
        after = wrapped.apply_chat_template(messages, tokenize=False, **facts.arguments)
        if after.startswith(text):
            reader.see({"messages": messages})
            row = reader.row({"messages": messages})
            assert row.prompt_ids == ids
            # An environment continues the sampled ids where the template continues the text.
            more = [{"role": "user", "content": "78"}]
            delta = renderer.delta(messages, more, [], ended=True)
            whole = wrapped.apply_chat_template(
                messages + more, tokenize=False, add_generation_prompt=True, **facts.arguments
            )
            sampled = row.responses[0].ids
            if delta is not None and last["content"] == last["content"].strip() and not has_spaces_at_ends(messages):
                ended = sampled if whole.startswith(after) and facts.ends[0] in after[len(text) :] else sampled[:-1]
                assert ids + ended + delta == wrapped.encode(whole, add_special_tokens=False)

    law()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_without_a_chat_template(name: str) -> None:
    wrapped = tokenizer(name)
    begin, end = wrapped.convert_tokens_to_ids([BOS, EOS])
    has_bos = "BOS" in name or "CLS" in name
    reader = Reader(FitDataConfig(train=Path("rows.jsonl")), "demonstrations", wrapped, [end], 10**6)

    @settings(max_examples=20)
    @given(texts("0123456789"), texts("QXZJ"), st.booleans(), st.booleans())
    def law(prompt: str, response: str, writes_bos: bool, writes_eos: bool) -> None:
        prompt, response = BOS * writes_bos + prompt, response + EOS * writes_eos
        ids = text_ids(wrapped, prompt)
        assert ids.count(begin) == (has_bos or writes_bos)
        assert end not in ids
        assert ids[has_bos and not writes_bos :] == wrapped.encode(prompt, add_special_tokens=False)
        assert TextRenderer(wrapped).prompt([{"role": "user", "content": prompt}], []) == ids
        assert tokenized_prompt(prompt, DataConfig(train=Path("rows.jsonl")), wrapped) == (prompt, ids)
        row = {"prompt": prompt, "response": response}
        reader.see(row)
        found = reader.row(row)
        (answer,) = found.responses
        assert found.prompt_ids == ids
        assert answer.ids.count(end) == 1
        assert answer.ids[-1] == end
        assert all(answer.learned)
        whole = wrapped.encode(prompt + response.removesuffix(EOS), add_special_tokens=False)
        if prompt == prompt.rstrip() and response == response.strip() and not has_spaces_at_ends([{"content": prompt}]):
            got = (ids + answer.ids[:-1])[has_bos and not writes_bos :]
            assert got == whole
        assert not any(set(wrapped.convert_ids_to_tokens(token)) & set("0123456789") for token in answer.ids)

    law()
