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


@pytest.mark.parametrize("name", TOKENIZERS)
def test_stored_chats(name: str) -> None:
    @settings(max_examples=40)
    @given(conversations(), st.sampled_from(sorted(FAMILIES)), st.sampled_from(["all", "last"]))
    def law(messages: list[dict[str, Any]], family: str, turns: str) -> None:
        facts = FAMILIES[family]
        if not facts.system:
            messages = [m for m in messages if m["role"] != "system"]
        wrapped = tokenizer(name, facts.template, facts.ends[0])
        reader, row = reader_of(facts, wrapped, turns=turns), {"messages": messages}
        reader.see(row)
        at = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        at = at if turns == "all" else at[-1:]
        if facts.changes and len(at) > 1:
            with pytest.raises(ValueError, match=r"changes earlier messages .*turns: last"):
                reader.row(row)
            return
        found = reader.row(row)
        (response,) = found.responses
        ids = found.prompt_ids + response.ids
        learned = [False] * len(found.prompt_ids) + response.learned

        def rendered(chat: list[dict[str, Any]], generate: bool = False) -> list[int]:
            text = wrapped.apply_chat_template(chat, tokenize=False, add_generation_prompt=generate, **facts.arguments)
            return list(wrapped.encode(text, add_special_tokens=False))

        # Every id of the whole text once, up to the end of the last answer, which is added if the template has none.
        whole = rendered(messages)
        body = ids if ids == whole[: len(ids)] else ids[:-1]
        if body != whole[: len(body)]:  # a token of the text would cross a border between two speakers
            borders = [rendered(messages[:i], True) for i in at] + [rendered(messages[: i + 1]) for i in at]
            assert any(border != whole[: len(border)] for border in borders)
            assert written_by("0123456789QXZJ", wrapped, ids) == written_by("0123456789QXZJ", wrapped, whole)
        # Learned: what the assistant wrote with its ends, and nothing that others or the template wrote.
        ends, own = set(reader.end_ids), [token for token, is_own in zip(ids, learned, strict=True) if is_own]
        assert own[-1] in ends
        assert sum(token in ends for token in own) == (len(at) if family != "plain" else 1)
        assert written_by("0123456789", wrapped, own) == ""
        answers = "".join(messages[i]["content"] for i in at)
        assert written_by("QXZJ", wrapped, own) == "".join(c for c in answers if c in "QXZJ")
        special = set(wrapped.convert_tokens_to_ids(templates.SPECIAL))
        assert special & {*own} <= ends | set(wrapped.convert_tokens_to_ids(list(facts.opens)))

    law()


def written_by(alphabet: str, wrapped: Any, ids: list[int]) -> str:
    """The characters of an alphabet in the text of ids that are no special tokens."""
    special = set(wrapped.convert_tokens_to_ids(templates.SPECIAL))
    text = "".join(wrapped.convert_ids_to_tokens([token for token in ids if token not in special]))
    return "".join(c for c in text.replace("<0x0A>", "") if c in alphabet)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_prompts_of_runs_and_environments(name: str) -> None:
    """A prompt is the same in a run, an evaluation and an environment, and what a stored row has before its answer."""

    @settings(max_examples=30)
    @given(conversations(), st.sampled_from(sorted(FAMILIES)))
    def law(messages: list[dict[str, Any]], family: str) -> None:
        facts = FAMILIES[family]
        if not facts.system:
            messages = [m for m in messages if m["role"] != "system"]
        wrapped = tokenizer(name, facts.template, facts.ends[0])
        renderer = ChatRenderer(wrapped, **facts.arguments)
        config = DataConfig(train=Path("rows.jsonl"), template_arguments=facts.arguments)
        text, ids = tokenized_prompt(messages[:-1], config, wrapped)
        assert ids == wrapped.encode(text, add_special_tokens=False)
        assert ids == renderer.prompt(messages[:-1], [])
        after = wrapped.apply_chat_template(messages, tokenize=False, **facts.arguments)
        if not after.startswith(text):
            assert family in ("deepseek r1", "qwen 3 without thinking")
            return
        reader = reader_of(facts, wrapped, turns="last")
        reader.see({"messages": messages})
        row = reader.row({"messages": messages})
        assert row.prompt_ids == ids
        # An environment continues the sampled ids where the template continues the text.
        more = [*messages, {"role": "user", "content": "78"}]
        delta = renderer.delta(messages, more[-1:], [], ended=True)
        if delta is None or family in ("glm", "plain"):  # no end token in the text: the sampler stopped elsewhere
            return
        longer = wrapped.apply_chat_template(more, tokenize=False, add_generation_prompt=True, **facts.arguments)
        whole, got = wrapped.encode(longer, add_special_tokens=False), ids + row.responses[0].ids + delta
        if got != whole:
            assert messages[-1]["content"] != messages[-1]["content"].strip() or ids != whole[: len(ids)]
        assert written_by("0123456789QXZJ", wrapped, got) == written_by("0123456789QXZJ", wrapped, whole)

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
        if prompt == prompt.rstrip() and response == response.strip():
            assert (ids + answer.ids[:-1])[has_bos and not writes_bos :] == whole
        assert not any(set(wrapped.convert_ids_to_tokens(token)) & set("0123456789") for token in answer.ids)

    law()
