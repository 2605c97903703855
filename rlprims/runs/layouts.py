"""The layouts of the files that other libraries and data sets use: a layout is data, the paths of our fields."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from rlprims import _json

Use: TypeAlias = Literal["prompts", "demonstrations", "pairs"]
"""What the rows are for: prompts for samples; demonstrations; pairs of a chosen and a rejected response."""


class Layout(NamedTuple):
    """The place of each field in a row."""

    fields: Mapping[str, str]
    """By the name of the setting the path. A row has the layout if it has them all."""
    optional: Mapping[str, str] = {}
    begins: str = ""
    """How the text of the first field begins, where only that tells the layout."""


def _cases(tests: Any) -> Any:
    """A list of input and output as two lists."""
    tests = _json.loads(tests) if isinstance(tests, str) else tests
    return {"inputs": [each["input"] for each in tests], "outputs": [each["output"] for each in tests]}


_CONVERT = {"livecodebench": _cases}
"""By layout what makes of the answer what verifiers read."""
_TABLES = _json.beside(__file__, "layouts.json")
LAYOUTS: dict[Use, dict[str, Layout]] = {
    use: {name: Layout(**layout) for name, layout in layouts.items()} for use, layouts in _TABLES["layouts"].items()
}
"""By what the rows are for and by name; the first that fits is recognized."""
NEEDED: dict[Use, list[str]] = _TABLES["needed"]
_OTHERS: dict[Use, list[str]] = _TABLES["others"]
MISSING = object()


def value_at(row: Any, path: str) -> Any:
    """The value at a path, or MISSING. A field whose whole name is the path comes first.

    >>> value_at({"reward_model": {"ground_truth": 4}}, "reward_model.ground_truth")
    4
    >>> value_at({"messages": [{"content": "a"}, {"content": "b"}]}, "messages[-1].content")
    'b'
    """
    if isinstance(row, Mapping) and path in row:
        return row[path]
    value: Any = row if path else MISSING
    for name, index in re.findall(r"([^.\[\]]+)|\[(-?\d+)\]", path):
        try:
            value = value[int(index)] if index else value[name] if isinstance(value, Mapping) else MISSING
        except (KeyError, IndexError, TypeError):  # also of MISSING[0]
            return MISSING
    return value


class Fields(NamedTuple):
    """The paths of the fields that a file has, by the names of the settings."""

    paths: Mapping[str, str]
    layout: str | None
    """The name of the layout that gave some of them."""
    convert: Callable[[Any], Any] | None = None

    @property
    def described(self) -> str | None:
        """The layout in words; None without one."""
        places = ", ".join(f"{name} in {path}" for name, path in self.paths.items())
        return None if self.layout is None else f"{self.layout}: {places}"


def fields_of(config: Any, use: Use, row: Mapping[str, Any]) -> Fields:
    """The paths of the fields by the settings, or those of a layout for fields that the settings do not name.

    Without ``data.layout`` a layout is recognized by the row, unless the row has the fields that are needed: of a
    demonstration the messages are enough, and an environment needs none.
    """
    paths = {name: str(getattr(config, name)) for name in (*NEEDED[use], *_OTHERS[use])}
    has_chat = "messages" in paths and value_at(row, paths["messages"]) is not MISSING
    needed = [] if has_chat or getattr(config, "environment", None) is not None else NEEDED[use]
    name = config.layout
    if name is None and any(value_at(row, paths[field]) is MISSING for field in needed):
        name = layout_of(row, use)
    if name is None:
        return Fields(paths, None)
    if name not in LAYOUTS[use]:
        raise ValueError(f"data.layout: no {name!r} for {use}: choose from {', '.join(LAYOUTS[use])}")
    layout = LAYOUTS[use][name]
    given = {**layout.fields, **layout.optional}
    own_choice = {field: path for field, path in paths.items() if field in config.model_fields_set}
    return Fields({**paths, **given, **own_choice}, name, _CONVERT.get(name))


def layout_of(row: Mapping[str, Any], use: Use) -> str | None:
    """The name of the first layout that the row has; None if it has none."""
    for name, layout in LAYOUTS[use].items():
        values = [value_at(row, path) for path in layout.fields.values()]
        if MISSING not in values and (not layout.begins or str(values[0]).startswith(layout.begins)):
            return name
    return None


def is_chat(value: Any) -> bool:
    """Whether a value is a list of objects, as messages are."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


def as_messages(value: Any, layout: str | None = None) -> Any:
    """Messages in the form of OpenAI, if the value is a chat in another form; otherwise the value.

    Other forms are those of ShareGPT (``from`` and ``value``), one message alone, calls of tools, in the layout hh a
    dialogue as text, and in the layout xlam calls as text.

    >>> as_messages([{"from": "human", "value": "hi"}])
    [{'role': 'user', 'content': 'hi'}]
    >>> as_messages("\\n\\nHuman: hi\\n\\nAssistant: hello", "hh")
    [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'hello'}]
    """
    if layout == "hh" and isinstance(value, str):
        said = re.split(r"\n\n(Human|Assistant):", value)[1:]
        roles = ["user" if who == "Human" else "assistant" for who in said[::2]]
        return [{"role": role, "content": text.strip()} for role, text in zip(roles, said[1::2], strict=True)]
    if (layout == "xlam" or is_chat(value)) and (calls := as_calls(value)):
        return [{"role": "assistant", "content": None, "tool_calls": calls}]
    if isinstance(value, dict) and ("from" in value or "role" in value):
        value = [value]
    return [_message(each) for each in value] if is_chat(value) and all("from" in each for each in value) else value


def _message(said: Mapping[str, Any]) -> dict[str, Any]:
    who, text = said["from"], said.get("value")
    role = _ROLES.get(who, who)
    if who == "function_call" and (calls := as_calls(text)):
        return {"role": role, "content": None, "tool_calls": calls}
    return {"role": role, "content": text}


def as_calls(value: Any) -> list[dict[str, Any]] | None:
    """The calls of tools in the form of OpenAI, from one or several ``{"name": ..., "arguments": ...}``."""
    if isinstance(value, str):
        try:
            value = _json.loads(value)
        except ValueError:
            return None
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
        return None
    return [{"type": "function", "function": {"name": each["name"], "arguments": each["arguments"]}} for each in calls]
