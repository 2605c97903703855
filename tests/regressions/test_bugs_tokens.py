"""Text to token ids: threads about ids that no sampler sees, ends that are doubled or lost, and arguments twice."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from rlprims.fit.config import FitDataConfig
from rlprims.fit.rows import Reader
from rlprims.trainer.data import DataConfig, tokenized_prompt
from tests.trainer.test_chats import ADD, ASKED, row_of
from tests.turns import chat_templates as templates
from tests.turns.tokenizers import BOS, EOS, TOKENIZERS, tokenizer

SAID = [*ASKED, {"role": "assistant", "content": "QX"}]
LONGER = [*SAID, *ASKED, {"role": "assistant", "content": "Z"}]
R1_END = "<｜end▁of▁sentence｜>"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_n1_trl_2054_a_prompt_that_ends_with_a_space_is_followed_by_the_same_response(name: str) -> None:
    """trl#2054: the last token of the prompt alone was another one before the response, which then began too late."""
    wrapped = tokenizer(name)
    reader = Reader(FitDataConfig(train=Path("rows.jsonl")), "pairs", wrapped, [wrapped.eos_token_id], 10**6)
    pair = {"prompt": "[INST] 12 [/INST] ", "chosen": "QX", "rejected": "Z"}
    reader.see(pair)
    row = reader.row(pair)
    sampled = tokenized_prompt(pair["prompt"], DataConfig(train=Path("rows.jsonl")), wrapped)[1]
    assert row.prompt_ids == sampled
    for response, text in zip(row.responses, ("QX", "Z"), strict=True):
        body = "".join(wrapped.convert_ids_to_tokens(response.ids[:-1]))
        assert "".join(c for c in body if c.isalpha()) == text
        assert "]" not in body


@pytest.mark.parametrize("turns", ["all", "last"])
def test_n2_trl_4481_a_chat_ends_once(turns: str) -> None:
    """trl#4481: the template had written the end, and the trainer added it: <|im_end|><|im_end|>."""
    wrapped = tokenizer("byte-level", templates.CHATML, "<|im_end|>")
    end = wrapped.eos_token_id
    reader = Reader(FitDataConfig(train=Path("rows.jsonl"), turns=turns), "pairs", wrapped, [end], 10**6)
    pair = {"prompt": ASKED, "chosen": [SAID[-1]], "rejected": [LONGER[-1]]}
    reader.see(pair)
    for response in reader.row(pair).responses:
        assert response.ids.count(end) == 1
        assert response.ids[-1] == end


def test_n3_trlx_287_no_end_stands_between_a_prompt_and_its_response() -> None:
    """trlx#287: the tokenizer's EOS behind the prompt, after which the model sampled nothing but another EOS."""
    for name in ("byte-level, BOS and EOS", "word piece, CLS and SEP", "unigram, never, EOS"):
        wrapped = tokenizer(name)
        assert wrapped.encode("12")[-1] == wrapped.convert_tokens_to_ids(EOS)
        ids = tokenized_prompt("12", DataConfig(train=Path("rows.jsonl")), wrapped)[1]
        assert wrapped.convert_tokens_to_ids(EOS) not in ids
        assert ids.count(wrapped.convert_tokens_to_ids(BOS)) == wrapped.encode("12").count(wrapped.bos_token_id)


def test_n4_prime_rl_885_tools_and_arguments_that_are_json_text() -> None:
    """prime-rl#885: tables keep tools and arguments as text, which the template would write as text again."""
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 12}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    fields = {"messages": [*ASKED, answer], "tools": str([ADD]).replace("'", '"')}
    prompt, _, learned = row_of(templates.QWEN_TOOLS, fields, "<|im_end|>")
    assert '{"type": "function", "function": {"name": "add"' in prompt
    assert '"arguments": {"a": 12}' in learned
    assert "\\" not in prompt + learned


def test_n5_llm_foundry_1474_the_date_reaches_the_template() -> None:
    """llm-foundry#1474: Llama 3.1's template wrote its own old date, because nobody gave it one."""
    wrapped = tokenizer("byte-level", templates.LLAMA_3_DATE, "<|eot_id|>")
    config = DataConfig(train=Path("rows.jsonl"), template="chat", time=datetime(2026, 3, 1))
    assert "Today Date: 01 Mar 2026" in tokenized_prompt("12?", config, wrapped)[0]
    named = config.model_copy(update={"template_arguments": {"date_string": "2 April"}})
    assert "Today Date: 2 April" in tokenized_prompt("12?", named, wrapped)[0]


HISTORY = templates.GLM.replace(
    "{{ m.content }}",
    "{{ m.content if m.role != 'assistant' or loop.last else '</think>' + m.content.split('</think>')[-1] }}",
)
"""GLM's tags; the reasoning of earlier answers is removed."""


def test_n6_megatron_bridge_5633_an_earlier_answer_is_learned_or_refused() -> None:
    """Megatron-Bridge#5633: the answer after reasoning that a longer chat removes was left out of the loss, unsaid."""
    ends = ("<|endoftext|>", "<|user|>")
    _, _, learned = row_of(templates.GLM, {"messages": LONGER}, *ends)
    assert learned == "QX<|user|>Z<|endoftext|>"
    thought = [*ASKED, {"role": "assistant", "content": "<think>J</think>QX"}, *LONGER[2:]]
    with pytest.raises(ValueError, match=r"changes earlier messages .*turns: last"):
        row_of(HISTORY, {"messages": thought}, *ends)
    assert row_of(HISTORY, {"messages": thought}, *ends, turns="last")[2] == "Z<|endoftext|>"


def test_n7_llamafactory_6987_a_stored_answer_follows_the_prompt_that_is_sampled_from() -> None:
    """LlamaFactory#6987: R1's prompt opens <think>, the trained one did not, and the model hallucinated after it."""
    keeps = templates.DEEPSEEK_CHAT.replace("<｜Assistant｜>{% endif %}", "<｜Assistant｜><think>\n{% endif %}")
    wrapped = tokenizer("byte-level", keeps, R1_END)
    sampled, _ = tokenized_prompt(ASKED, DataConfig(train=Path("rows.jsonl")), wrapped)
    answer = {"role": "assistant", "content": "<think>\nX\n</think>\n\nQ"}
    prompt, _, learned = row_of(keeps, {"messages": [*ASKED, answer]}, R1_END)
    assert prompt == sampled
    assert learned == f"X\n</think>\n\nQ{R1_END}"
    with pytest.raises(ValueError, match="leaves out the reasoning"):  # a template that never shows reasoning
        row_of(templates.DEEPSEEK_REASONING, {"messages": [*ASKED, answer]}, R1_END)


@pytest.mark.parametrize(
    ("template", "end", "how"),
    [
        (templates.CHATML, "<|im_end|>", {}),
        (templates.LLAMA_3, "<|eot_id|>", {}),
        (templates.QWEN_3, "<|im_end|>", {"enable_thinking": False}),
    ],
)
def test_n8_maxtext_3284_the_generation_prompt_is_not_learned(template: str, end: str, how: dict[str, Any]) -> None:
    """maxtext#3284: the tag of the assistant, and the empty thought behind it, counted in the loss."""
    prompt, _, learned = row_of(template, {"messages": SAID}, end, template_arguments=how)
    wrapped = tokenizer("byte-level", template, end)
    assert prompt == wrapped.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True, **how)
    assert learned == f"QX{end}"


def test_n9_verl_3477_a_chat_is_rendered_whole() -> None:
    """verl#3477: each message rendered alone had an empty thought, which the whole chat has at its end only."""
    with pytest.raises(ValueError, match=r"changes earlier messages .*turns: last"):
        row_of(templates.QWEN_3, {"messages": LONGER}, "<|im_end|>")
    prompt, response, _ = row_of(templates.QWEN_3, {"messages": LONGER}, "<|im_end|>", turns="last")
    wrapped = tokenizer("byte-level", templates.QWEN_3, "<|im_end|>")
    whole = wrapped.apply_chat_template(LONGER, tokenize=False)
    assert (prompt + response).rstrip() == whole.rstrip()
    assert whole.count("<think>") == 1
