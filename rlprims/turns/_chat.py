"""The tokens of an environment's messages, without those of the conversation before them."""

from collections.abc import Mapping, Sequence
from typing import Any

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_REASONING_END = "</think>"
_MARK = "\ue000"
"""A character of Unicode's private use area: messages do not contain it, and templates do not strip it like a space."""


def delta_ids(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    appended: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    *,
    ended: bool = True,
    **template_arguments: Any,
) -> list[int] | None:
    """The ids that continue a row from the last sampled token to where the next turn is sampled.

    They are the rest of the assistant's turn that the sampler did not emit (in ChatML the newline after
    ``<|im_end|>``), the appended messages, and the generation prompt. The next prompt is ``row.token_ids + delta``.
    The sampled ids are not tokenized again, so they may differ from the ids of the template's text.

    ``messages`` and ``messages + appended`` are rendered as text and compared. The second text must begin with the
    first. The difference is tokenized after the token that ends the turn, which replaces the conversation.

    Args:
        tokenizer: of Hugging Face, or an object with ``apply_chat_template``, ``encode`` and ``all_special_tokens``.
        messages: the conversation, the assistant's sampled message last.
        appended: the messages after it: from tools, the environment or the user. Pass all of them in one call, because
            templates may join neighbouring messages.
        tools: for the template.
        ended: the last sampled id is the token that ends the turn (``finish="stop"``). False if sampling ended
            by length or a stop text: then the end token is in the result.
        template_arguments: for the template, such as ``enable_thinking``.

    Returns:
        the ids; or None if the template does not allow it: it changes earlier messages when others follow (removes
        reasoning, or adds an end to the last message), it omits sampled reasoning, or the end of the assistant's turn
        is not found. Then render the whole conversation as the prompt of the next turn: :func:`merge` opens a new row.

    Raises:
        ValueError: the last message is not the assistant's, or nothing is appended.

    >>> class Words:
    ...     all_special_tokens = ["<end>"]
    ...     def apply_chat_template(self, messages, *, add_generation_prompt, **_):
    ...         text = "".join(f"{m['role']}: {m['content']} <end> \\n " for m in messages)
    ...         return text + "assistant:" * add_generation_prompt
    ...     def encode(self, text, add_special_tokens):
    ...         return [{"<end>": 0, "\\n": 1, "user:": 2, "assistant:": 3, "more": 4}[w] for w in text.split(" ") if w]
    >>> chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    >>> delta_ids(Words(), chat, [{"role": "user", "content": "more"}])
    [1, 2, 4, 0, 1, 3]
    """
    if not messages or messages[-1].get("role") != "assistant":
        raise ValueError("the last of messages is not the assistant's, expected the message that was sampled")
    if not appended:
        raise ValueError("appended is empty, expected the messages that follow the sampled one")

    def render(chat: Sequence[Mapping[str, Any]], *, generate: bool = False) -> str:
        text: str = tokenizer.apply_chat_template(
            list(chat), tools=tools, tokenize=False, add_generation_prompt=generate, **template_arguments
        )
        return text

    *history, sampled = messages
    has_reasoning, sampled = _mark_reasoning(sampled)
    before = render([*history, sampled])
    after = render([*history, sampled, *appended], generate=True)
    if not after.startswith(before) or (has_reasoning and _MARK not in before):
        return None
    _, found, turn_end = render([*history, {"role": "assistant", "content": _MARK}]).rpartition(_MARK)
    if not found or not before.endswith(turn_end):
        return None
    emitted = _end_token(tokenizer, turn_end) if ended else 0
    context = turn_end[:emitted] or "."
    return _encode_after(tokenizer, context, turn_end[emitted:] + after[len(before) :])


def _mark_reasoning(message: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Whether the message has reasoning; and the message with a mark at its end, to see if the template keeps it."""
    marked, content = dict(message), message.get("content")
    keys = [key for key in _REASONING_KEYS if message.get(key)]
    marked |= {key: f"{message[key]}{_MARK}" for key in keys}
    if isinstance(content, str) and _REASONING_END in content:
        reasoning, end, answer = content.rpartition(_REASONING_END)
        return True, marked | {"content": f"{reasoning}{_MARK}{end}{answer}"}
    return bool(keys), marked


def _end_token(tokenizer: Any, turn_end: str) -> int:
    """The index at which the first special token of the text ends; 0 if it has none."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {*tokenizer.all_special_tokens, *(str(token) for token in added if getattr(token, "special", False))}
    ends = [(start, -len(token)) for token in special if token and (start := turn_end.find(token)) >= 0]
    if not ends:
        return 0
    start, minus_length = min(ends)
    return start - minus_length


def _encode_after(tokenizer: Any, context: str, text: str) -> list[int]:
    """The ids of a text that follows another one: tokenizers may treat the beginning of a text differently."""
    known = list(tokenizer.encode(context, add_special_tokens=False))
    ids = list(tokenizer.encode(context + text, add_special_tokens=False))
    if ids[: len(known)] != known:  # a token crosses the border, but sampled tokens cannot be part of another token
        return list(tokenizer.encode(text, add_special_tokens=False))
    return ids[len(known) :]
