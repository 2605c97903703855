"""Tool calls in a model's text. The text is parsed, never evaluated, in time linear in its length."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from rlprims import _json
from rlprims.environments._tools import schemas_of
from rlprims.masking import check_choice

CallStyle: TypeAlias = Literal["json", "xml", "tags"]


class ToolCall(NamedTuple):
    """One call of a tool."""

    name: str
    arguments: dict[str, Any]


class ParsedCalls(NamedTuple):
    """The result of :func:`parse_calls`."""

    content: str
    """The text without the calls."""
    calls: list[ToolCall]
    malformed: list[str]
    """The error of each call that could not be parsed."""


def parse_calls(text: str, style: CallStyle = "json", *, tools: Sequence[Any] = ()) -> ParsedCalls:
    """The calls in a text.

    - ``json`` (Hermes, Qwen): ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>``.
    - ``xml`` (Qwen3-Coder): ``<tool_call><function=add><parameter=a>1</parameter></function></tool_call>``. Values are
      text; :func:`answer_calls` converts them to the parameters' types.
    - ``tags``: the tag of a tool is its name, ``<add><a>1</a><b>2</b></add>``. Without tags inside, the text is the
      tool's first parameter: ``<search>query</search>``.

    A call is malformed if it is not closed, if its JSON is not an object with a name and arguments, or if its tags are
    wrong. A call of an unknown tool is not malformed: the environment answers it.

    Args:
        text: the text of the model.
        style: one of the above.
        tools: tools from :func:`tool`, or schemas; ``tags`` needs them.

    >>> parse_calls('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ParsedCalls(content='Let me see.', calls=[ToolCall(name='add', arguments={'a': 1})], malformed=[])
    >>> parse_calls('<tool_call>{"name": "add", "arguments": {"a": 1}').malformed
    ['<tool_call> is not closed: expected </tool_call>']
    """
    check_choice("style", style, CallStyle)
    parameters = {s["function"]["name"]: list(s["function"]["parameters"]["properties"]) for s in schemas_of(tools)}
    content, calls, malformed = list[str](), list[ToolCall](), list[str]()
    for tag, inside in _elements(text, list(parameters) if style == "tags" else ["tool_call"]):
        if tag is None:
            content.append(inside or "")
            continue
        try:
            if inside is None:
                raise ValueError(f"<{tag}> is not closed: expected </{tag}>")
            if style == "json":
                calls.append(_json_call(inside))
            else:
                calls.append(_xml_call(inside) if style == "xml" else ToolCall(tag, _tagged(inside, parameters[tag])))
        except (ValueError, RecursionError) as error:  # RecursionError: JSON that is nested too deeply
            malformed.append(str(error))
    return ParsedCalls("".join(content).strip(), calls, malformed)


def _elements(text: str, tags: Sequence[str]) -> Iterator[tuple[str | None, str | None]]:
    """Each element's tag and content (None if it is not closed), and the texts between them, with the tag None."""
    begin = 0
    opening = {tag: text.find(f"<{tag}>") for tag in tags}
    while open_tags := {at: tag for tag, at in opening.items() if at >= 0}:
        start = min(open_tags)
        tag = open_tags[start]
        yield None, text[begin:start]
        inside = start + len(f"<{tag}>")
        end = text.find(f"</{tag}>", inside)
        if end < 0:
            yield tag, None
            return
        yield tag, text[inside:end]
        begin = end + len(f"</{tag}>")
        opening = {tag: text.find(f"<{tag}>", begin) if 0 <= at < begin else at for tag, at in opening.items()}
    yield None, text[begin:]


def _json_call(text: str) -> ToolCall:
    value = _json.loads(text, constants=False)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('expected an object with a name, {"name": ..., "arguments": {...}}')
    arguments = value.get("arguments", value.get("parameters", {}))  # Llama 3.1 writes parameters
    arguments = _json.loads(arguments, constants=False) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments of {value['name']!r}: expected an object, got {type(arguments).__name__}")
    return ToolCall(value["name"], arguments)


def _xml_call(text: str) -> ToolCall:
    name, rest = _named(text.strip(), "function")
    arguments, rest = dict[str, Any](), rest.removesuffix("</function>").strip()
    while rest:
        parameter, rest = _named(rest, "parameter")
        value, closed, rest = rest.partition("</parameter>")
        if not closed:
            raise ValueError(f"<parameter={parameter}> is not closed: expected </parameter>")
        arguments[parameter] = value.strip("\n")
        rest = rest.strip()
    if not text.strip().endswith("</function>"):
        raise ValueError(f"<function={name}> is not closed: expected </function>")
    return ToolCall(name, arguments)


def _named(text: str, tag: str) -> tuple[str, str]:
    """The name and the rest of ``<tag=name>rest``."""
    name, closed, rest = text.removeprefix(f"<{tag}=").partition(">")
    if not text.startswith(f"<{tag}=") or not closed or not name:
        raise ValueError(f"expected <{tag}=name>, got {text[:40]!r}")
    return name, rest


def _tagged(text: str, parameters: Sequence[str]) -> dict[str, Any]:
    arguments, between = dict[str, Any](), list[str]()
    for tag, inside in _elements(text, parameters):
        if tag is None:
            between.append(inside or "")
        elif inside is None:
            raise ValueError(f"<{tag}> is not closed: expected </{tag}>")
        else:
            arguments[tag] = inside
    left = "".join(between).strip()
    if left and (arguments or not parameters):
        raise ValueError(f"{left[:40]!r} is outside of parameters, expected tags of {', '.join(parameters) or 'none'}")
    return {parameters[0]: left} if left else arguments
