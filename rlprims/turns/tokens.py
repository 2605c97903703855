"""From texts and messages to token ids: the one place for prompts, stored rows, environments and evaluation.

The ids of a row are the ids of its whole rendered text, each once. A token that would contain text of both sides of the
border between prompt and response is the exception: the sampler cannot draw it, so both sides are tokenized apart.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from rlprims import _json

MARK = "\ue000"
"""A character of Unicode's private use area: messages do not contain it, and templates do not strip it like a space."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
REASONING_END = "</think>"
_CHANGES = "the chat template changes earlier messages when message {} is added, so that no row can have all of them: "
_CHANGES += "set data.turns: last"


def text_ids(tokenizer: Any, text: str, *, whole: bool = False, **options: Any) -> list[int]:
    """The ids of a text that no chat template wrote; without ``whole`` it is a prompt, and a response follows.

    The tokenizer adds the tokens that begin a text, such as BOS, unless the text begins with them. Those that it adds
    at the end stay only with ``whole``, and unless the text ends with them. ``options`` are for its ``encode``.
    """
    bare, full = encode(tokenizer, text, **options), list(tokenizer.encode(text, **options))
    size = len(bare)
    at = next((i for i in range(len(full) - size + 1) if full[i : i + size] == bare), None)
    if at is None or not bare:
        return full
    begin, end = full[:at], full[at + size :]
    ids = bare if bare[:at] == begin else begin + bare
    return ids + end if whole and end and ids[-len(end) :] != end else ids


def encode(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """The ids of exactly this text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has half of a surrogate pair, {text[error.start]!r}: it is no character") from None
    return list(tokenizer.encode(text, add_special_tokens=False, **options))


def encode_after(tokenizer: Any, context: str, text: str) -> list[int]:
    """The ids of a text that follows another one: tokenizers may treat the beginning of a text differently."""
    # If a token crosses the border, another context takes its place: sampled tokens cannot be part of another token.
    for before in (context, *".x\n)"):
        if before:
            known = encode(tokenizer, before)
            ids = encode(tokenizer, before + text)
            if ids[: len(known)] == known:
                return ids[len(known) :]
    return encode(tokenizer, text)


class Answered(NamedTuple):
    """The tokens of a chat whose answers are learned."""

    prompt_ids: list[int]
    ids: list[int]
    learned: list[bool]
    """One bool per id after the prompt: True on tokens that the assistant wrote."""


@dataclass(frozen=True)
class Chat:
    """Renders messages with the tokenizer's chat template."""

    tokenizer: Any
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """For the template, such as ``enable_thinking``."""

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, generate: bool = False) -> str:
        """The rendered text; with ``generate`` up to where the assistant begins to write."""
        plain = [self._plain(message) for message in messages]
        try:
            text: str = self.tokenizer.apply_chat_template(
                plain, tools=tools or None, tokenize=False, add_generation_prompt=generate, **self.arguments
            )
        except Exception as error:  # a template may raise anything
            reason = " ".join(str(error).split())
            raise ValueError(f"the chat template refuses the messages: {reason} ({type(error).__name__})") from error
        return text

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, **options: Any) -> list[int]:
        """The ids of the conversation up to where the assistant begins to write."""
        return encode(self.tokenizer, self.text(messages, tools, generate=True), **options)

    def answered(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, *, first: int, end_ids: Sequence[int], end: int
    ) -> Answered:
        """A chat that ends with the assistant. Its answers from message ``first`` on are learned up to their ends.

        The end of an answer is the first of ``end_ids`` after its text: in its own message, or where the next message
        begins. If the last answer has no end, ``end`` is added. Text of the template after it is left out.
        """
        assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        prompt_ids, ids, learned = list[int](), list[int](), list[bool]()
        written, context, is_open = "", "", False
        for i in assistant:
            asked, after = self._asked(messages[: i + 1], tools)
            if not asked.startswith(written):
                raise ValueError(_CHANGES.format(i))
            question, response = asked[len(written) :], after[len(asked) :]
            between = encode_after(self.tokenizer, context, question) if context else encode(self.tokenizer, question)
            answer = encode_after(self.tokenizer, question or context, response)
            own = self._own(messages[i], answer, end_ids)
            if i == assistant[-1]:
                answer = [*answer, end] if own is None else answer[:own]
            if not prompt_ids:
                prompt_ids = between
            else:
                ids += between
                learned += [is_open and at == 0 and token in end_ids for at, token in enumerate(between)]
            ids += answer
            learned += [own is None or at < own for at in range(len(answer))]
            written, context, is_open = after, response or question, own is None
        return Answered(prompt_ids, ids, learned)

    def _asked(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> tuple[str, str]:
        """The text before the last message, which the assistant wrote, and the text with it."""
        *before, last = messages
        asked, after = self.text(before, tools, generate=True), self.text(messages, tools)
        has_reasoning, marked = mark_reasoning(last)
        if has_reasoning and MARK not in self.text([*before, marked], tools):
            what = f"the reasoning of message {len(before)}, which is to be learned"
            raise ValueError(f"the chat template leaves out {what}: remove it, or use a template that keeps it")
        if not after.startswith(asked):  # the template opens reasoning for the sampler, which the message does not have
            head, found, _ = self.text([*before, {"role": "assistant", "content": MARK}], tools).partition(MARK)
            if not found or not after.startswith(head):
                raise ValueError(_CHANGES.format(len(before)))
            asked = head
        return asked, after

    def _own(self, message: Mapping[str, Any], answer: Sequence[int], end_ids: Sequence[int]) -> int | None:
        """The number of ids up to the end of an answer; None if nothing ends it. The text itself may have ends."""
        found = [at for at, token in enumerate(answer) if token in end_ids]
        if not found:
            return None
        texts, values = self.tokenizer.convert_ids_to_tokens(list(end_ids)), json.dumps(message, ensure_ascii=False)
        which = min(sum(values.count(text) for text in texts), len(found) - 1)
        while which and found[which - 1] == found[which] - 1:  # the text ends with an end, and the template adds one
            which -= 1
        return found[which] + 1

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message as templates expect it: no keys without a value, arguments of calls as mappings."""
        plain = {key: value for key, value in message.items() if value is not None}
        if isinstance(plain.get("content"), list) and all(map(_is_text, plain["content"])):
            plain["content"] = "".join(part["text"] for part in plain["content"])
        if "tool_calls" in plain:
            plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
            if message.get("content") is None:
                plain["content"] = "" if self._writes_null else None
        if isinstance(plain.get("content"), str) and self._wants_parts:
            plain["content"] = [{"type": "text", "text": plain["content"]}]
        return plain

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template writes only texts that are parts, as some of models with vision do."""
        template = self.arguments.get("chat_template", getattr(self.tokenizer, "chat_template", ""))
        return "type" in str(template) and MARK not in self._tried([{"role": "user", "content": MARK}], failed=MARK)

    @cached_property
    def _writes_null(self) -> bool:
        """Whether the template writes None for a content that is null."""
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        return "None" in self._tried(chat, failed="None")

    def _tried(self, chat: list[Any], failed: str) -> str:
        """The text of a chat; ``failed`` if the template raises, such as a TypeError from null + text."""
        try:
            return str(self.tokenizer.apply_chat_template(chat, tokenize=False, **self.arguments))
        except Exception:
            return failed


def has_image_parts(messages: Any) -> bool:
    """Whether a value is messages of which one has an image."""
    contents = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    return any(is_image_part(part) for content in contents if isinstance(content, list) for part in content)


def is_image_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def images_in(messages: Sequence[Mapping[str, Any]]) -> tuple[bytes, ...]:
    """The images of messages whose parts have them as bytes."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return tuple(part["image"] for part in parts if is_image_part(part))


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") == "text"


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = _json.loads(function["arguments"], constants=False)
    except ValueError:
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else dict(call)


def mark_reasoning(message: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Whether the message has reasoning; and the message with a mark at its end, to see if the template keeps it."""
    marked, content = dict(message), message.get("content")
    keys = [key for key in REASONING_KEYS if message.get(key)]
    marked |= {key: f"{message[key]}{MARK}" for key in keys}
    if isinstance(content, str) and REASONING_END in content:
        reasoning, end, answer = content.rpartition(REASONING_END)
        return True, marked | {"content": f"{reasoning}{MARK}{end}{answer}"}
    return bool(keys), marked


def checked_messages(value: Any, name: str, *, images: bool = False) -> list[dict[str, Any]]:
    """The messages of a row, which may be JSON text. With ``images`` they may have parts ``{"type": "image"}``.

    Raises:
        ValueError: not a list of objects with role and content as text; the content may be null beside tool calls.
    """
    value = _from_text(value)
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected a list of messages in {name!r}, got {shown(value)}")
    for i, message in enumerate(value):
        is_right = isinstance(message, dict) and isinstance(message.get("role"), str)
        content = message.get("content") if is_right else None
        parts = [part for part in content if not (images and is_image_part(part))] if isinstance(content, list) else []
        is_text = isinstance(content, str) or (isinstance(content, list) and all(map(_is_text, parts)))
        if not is_right or not (is_text or (content is None and message.get("tool_calls"))):
            raise ValueError(f"expected a text in role and content of {name}[{i}], got {shown(message)}")
    return value


def checked_tools(value: Any, name: str) -> list[dict[str, Any]] | None:
    """The schemas of a row's tools, which may be JSON text, or functions alone; None if there are none."""
    value = _from_text(value)
    if not value:
        return None
    if not isinstance(value, list):
        raise ValueError(f"expected a list of tools in {name!r}, got {shown(value)}")
    dicts = [each for each in value if isinstance(each, dict)]
    schemas = [{"type": "function", "function": each} if "name" in each else each for each in dicts]
    if len(schemas) < len(value) or not all(isinstance(each.get("function"), dict) for each in schemas):
        raise ValueError(f"expected tools with a function and its name in {name!r}, got {shown(value)}")
    return schemas


def _from_text(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return _json.loads(value)
        except ValueError:
            return value
    return value


def shown(value: Any, most: int = 80) -> str:
    """A value as short JSON, for messages."""
    text = json.dumps(value, default=str)
    return text if len(text) <= most else f"{text[: most - 3]}..."
