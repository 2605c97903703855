"""Conversion of messages to token ids, and of sampled ids to messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlprims.environments._calls import CallStyle, parse_calls
from rlprims.environments._protocol import Message
from rlprims.environments._tools import schemas_of
from rlprims.turns import delta_ids
from rlprims.turns.tokens import Chat, encode_after, text_ids


class TextRenderer:
    """Joins contents without roles, for base models without a chat template.

    Args:
        tokenizer: a tokenizer of Hugging Face.
        calls: the style of tool calls, as for :func:`parse_calls`.
    """

    def __init__(self, tokenizer: Any, *, calls: CallStyle = "tags") -> None:
        self.tokenizer, self.calls = tokenizer, calls

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """The ids of the joined contents, with the special tokens that the tokenizer adds at the start of a text."""
        return text_ids(self.tokenizer, _text(messages), verbose=False)

    def delta(
        self, messages: Sequence[Message], appended: Sequence[Message], tools: Sequence[Any], *, ended: bool
    ) -> list[int] | None:
        """The ids of the appended contents; it never asks for a new rendering."""
        end = getattr(self.tokenizer, "eos_token", None) if ended else None
        return encode_after(self.tokenizer, end or messages[-1]["content"], _text(appended))

    def read(self, token_ids: Sequence[int], tools: Sequence[Any]) -> Message:
        """The message of the sampled tokens, without special tokens."""
        return _read(self.tokenizer, token_ids, tools, self.calls)


class ChatRenderer:
    """Renders messages with the tokenizer's chat template.

    The arguments are those of :class:`TextRenderer`, and others for the template, such as ``enable_thinking``.
    """

    def __init__(self, tokenizer: Any, *, calls: CallStyle = "json", **template_arguments: Any) -> None:
        self.tokenizer, self.calls, self.template_arguments = tokenizer, calls, template_arguments

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """The ids of the conversation with the generation prompt."""
        chat = Chat(self._reader(messages), self.template_arguments)
        return chat.prompt(messages, schemas_of(tools), verbose=False)

    def delta(
        self, messages: Sequence[Message], appended: Sequence[Message], tools: Sequence[Any], *, ended: bool
    ) -> list[int] | None:
        """The ids from :func:`rlprims.turns.delta_ids`."""
        schemas = schemas_of(tools) or None
        reader = self._reader(appended)
        return delta_ids(reader, messages, appended, schemas, ended=ended, **self.template_arguments)

    def _reader(self, messages: Sequence[Message]) -> Any:
        """The tokenizer of a text that ends with these messages."""
        return self.tokenizer

    def read(self, token_ids: Sequence[int], tools: Sequence[Any]) -> Message:
        """The message of the sampled tokens, without special tokens."""
        return _read(self.tokenizer, token_ids, tools, self.calls)


def _text(messages: Sequence[Message]) -> str:
    return "".join(message["content"] for message in messages)


def _read(tokenizer: Any, token_ids: Sequence[int], tools: Sequence[Any], style: CallStyle) -> Message:
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    if not tools:
        return {"role": "assistant", "content": text}
    content, calls, malformed = parse_calls(text, style, tools=tools)
    functions: list[Mapping[str, Any]] = [{"type": "function", "function": call._asdict()} for call in calls]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message |= {"tool_calls": functions} if functions else {}
    return message | ({"malformed_calls": malformed} if malformed else {})
