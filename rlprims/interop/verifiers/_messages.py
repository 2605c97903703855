"""Conversion of messages between verifiers and rlprims."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlprims.environments import Message
from rlprims.interop.verifiers._package import package


def as_theirs(message: Message, number: int) -> Any:
    """The model's message as a response of verifiers; ``number`` makes the ids of its calls unique."""
    vf = package()
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [
        vf.ToolCall(id=f"call_{number}_{i}", name=function["name"], arguments=json.dumps(function["arguments"]))
        for i, function in enumerate(functions)
    ]
    cut = message.get("finish") == "length"
    written = vf.ResponseMessage(
        content=message["content"],
        tool_calls=calls or None,
        finish_reason="length" if cut else "tool_calls" if calls else "stop",
        is_truncated=cut,
    )
    return vf.Response(id=f"response_{number}", created=int(time.time()), model="policy", message=written)


def as_ours(message: Any) -> dict[str, Any]:
    """A message of verifiers in the form of chat templates, with the ids of its calls."""
    role = "user" if message.role == "text" else message.role
    ours: dict[str, Any] = {"role": role, "content": _text(message.content)}
    if message.role == "tool":
        ours["tool_call_id"] = message.tool_call_id
    calls, malformed = list[dict[str, Any]](), list[str]()
    for call in getattr(message, "tool_calls", None) or ():
        try:
            arguments = json.loads(call.arguments)
        except ValueError as error:
            malformed.append(f"arguments of {call.name!r}: {error}")
            continue
        calls.append({"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments}})
    return ours | ({"tool_calls": calls} if calls else {}) | ({"malformed_calls": malformed} if malformed else {})


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, Mapping) else part.model_dump() for part in content]
    if kinds := sorted({str(part.get("type")) for part in parts} - {"text"}):
        raise ValueError(f"expected messages of text, got a part of type {kinds[0]!r}: images and sound are not used")
    return "".join(part["text"] for part in parts)


def with_call_ids(messages: Sequence[Message], answered: Any) -> list[dict[str, Any]]:
    """The answers with the ids of their calls, in the order of ``answer_calls``: malformed ones last."""
    good = [call["id"] for call in as_ours(answered).get("tool_calls", [])]
    ids = iter([*good, *(call.id for call in answered.tool_calls or () if call.id not in good)])
    return [
        {"role": each["role"], "content": each["content"]}
        | ({"tool_call_id": next(ids, "")} if each["role"] == "tool" else {})
        for each in messages
    ]
