"""The tokens of an environment's messages, without those of the conversation before them."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlprims.turns.tokens import MARK, Chat, encode_after, mark_reasoning


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

    chat = Chat(tokenizer, template_arguments)
    *history, sampled = messages
    has_reasoning, sampled = mark_reasoning(sampled)
    before = chat.text([*history, sampled], tools)
    after = chat.text([*history, sampled, *appended], tools, generate=True)
    if not after.startswith(before) or (has_reasoning and MARK not in before):
        return None
    _, found, turn_end = chat.text([*history, {"role": "assistant", "content": MARK}], tools).rpartition(MARK)
    if not found or not before.endswith(turn_end):
        return None
    emitted = _end_token(tokenizer, turn_end) if ended else 0
    context = turn_end[:emitted] or "."
    return encode_after(tokenizer, context, turn_end[emitted:] + after[len(before) :])


def _end_token(tokenizer: Any, turn_end: str) -> int:
    """The index at which the first special token of the text ends; 0 if it has none."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {*tokenizer.all_special_tokens, *(str(token) for token in added if getattr(token, "special", False))}
    ends = [(start, -len(token)) for token in special if token and (start := turn_end.find(token)) >= 0]
    if not ends:
        return 0
    start, minus_length = min(ends)
    return start - minus_length
