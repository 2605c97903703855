"""Tools from functions: a schema from the signature and the docstring, and calls whose errors become messages."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from rlprims.environments._protocol import Message


@dataclass(frozen=True)
class Tool:
    """A function that a model may call; made by :func:`tool`."""

    fn: Callable[..., Any]
    schema: Mapping[str, Any]
    """The schema for chat templates."""
    arguments: type[BaseModel]

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def tool(fn: Callable[..., Any]) -> Tool:
    """Make a tool from a function: from its name, its docstring, and the types of its parameters.

    The docstring's first paragraph is the description. A line ``name: text`` under ``Args:`` describes a parameter.

    Raises:
        ValueError: a parameter without a type, or one that JSON cannot name; no docstring.

    >>> def search(query: str, limit: int = 3) -> str:
    ...     '''Search the library.
    ...
    ...     Args:
    ...         query: a few words.
    ...     '''
    >>> schema = tool(search).schema["function"]
    >>> schema["name"], schema["description"], schema["parameters"]["required"]
    ('search', 'Search the library.', ['query'])
    >>> schema["parameters"]["properties"]["query"]
    {'description': 'a few words.', 'type': 'string'}
    """
    documentation = inspect.getdoc(fn)
    if not documentation:
        raise ValueError(f"{fn.__qualname__} has no docstring: write one line that describes it to the model")
    hints, fields = get_type_hints(fn), dict[str, Any]()
    for name, parameter in inspect.signature(fn).parameters.items():
        if name not in hints or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"parameter {name!r} of {fn.__qualname__}: expected a name with a type, as in {name}: str")
        fields[name] = (hints[name], ... if parameter.default is parameter.empty else parameter.default)
    try:
        arguments = create_model(fn.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        parameters = arguments.model_json_schema()
    except Exception as error:  # pydantic raises several kinds, for types and for names
        raise ValueError(f"{fn.__qualname__} cannot be a tool: {error}") from None
    described = _described(documentation)
    properties = {
        name: {**({"description": described[name]} if name in described else {}), **_without_title(value)}
        for name, value in parameters.get("properties", {}).items()
    }
    schema = {**_without_title(parameters), "properties": properties}
    description = documentation.split("\n\n")[0].replace("\n", " ")
    function = {"name": fn.__name__, "description": description, "parameters": schema}
    return Tool(fn, {"type": "function", "function": function}, arguments)


def names_of(tools: Sequence[Any]) -> list[str]:
    """The names of tools, or of schemas."""
    return [str((each.schema if isinstance(each, Tool) else each)["function"]["name"]) for each in tools]


def schemas_of(tools: Sequence[Any]) -> list[Any]:
    """The schemas of tools for chat templates."""
    return [each.schema if isinstance(each, Tool) else each for each in tools]


def answer_calls(message: Message, tools: Sequence[Tool]) -> list[Message]:
    """Run the calls of a message: a ``tool`` message for each call, in order, and one for each malformed call.

    A call that fails is answered too, so that the model can correct it: its message has the cause as ``error``, which
    the driver counts (``malformed call``, ``unknown tool``, ``wrong arguments``, ``tool raised``). Arguments are
    checked against the types, and text is converted to a number if the parameter is a number.

    >>> def add(a: int, b: int) -> int:
    ...     '''Add two numbers.'''
    ...     return a + b
    >>> call = {"function": {"name": "add", "arguments": {"a": "19", "b": 4}}}
    >>> answer_calls({"role": "assistant", "content": "", "tool_calls": [call]}, [tool(add)])
    [{'role': 'tool', 'name': 'add', 'content': '23'}]
    """
    known = {each.name: each for each in tools}
    answers = [_answer(call["function"], known) for call in message.get("tool_calls", ())]
    for problem in message.get("malformed_calls", ()):
        answers.append({"role": "tool", "content": f"malformed call: {problem}", "error": "malformed call"})
    return answers


def _answer(call: Mapping[str, Any], tools: Mapping[str, Tool]) -> Message:
    name, answer = call["name"], {"role": "tool", "name": call["name"]}
    if name not in tools:
        known = ", ".join(tools) or "none"
        return {**answer, "content": f"unknown tool {name!r}; the tools are: {known}", "error": "unknown tool"}
    try:
        arguments = tools[name].arguments.model_validate(call["arguments"])
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return {**answer, "content": f"wrong arguments: {wrong}", "error": "wrong arguments"}
    values = {field: getattr(arguments, field) for field in type(arguments).model_fields}
    try:
        result = tools[name].fn(**values)
        content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    except Exception as error:
        return {**answer, "content": f"{type(error).__name__}: {error}", "error": "tool raised"}
    return {**answer, "content": content}


def _described(documentation: str) -> dict[str, str]:
    """The descriptions of parameters in the section Args."""
    _, found, section = documentation.partition("\nArgs:\n")
    described = dict[str, str]()
    for line in section.split("\n\n")[0].splitlines() if found else ():
        name, colon, text = line.strip().partition(":")
        if colon and name.isidentifier():
            described[name] = text.strip()
        elif described:  # a continuation line
            last = next(reversed(described))
            described[last] = f"{described[last]} {line.strip()}"
    return described


def _without_title(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "title"}
