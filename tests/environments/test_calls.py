"""Calls in text, schemas of functions, and that neither ever raises or evaluates."""

from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlprims.environments import ToolCall, answer_calls, parse_calls, tool


def search(query: str, limit: int = 3, *, order: Literal["new", "old"] = "new") -> str:
    """Search the library
    by words.

    Args:
        query: a few words,
            or one.
        limit: how many.

    Returns:
        titles: not a parameter.
    """
    return f"{query} {limit + 0} {order}"


def test_a_schema_has_what_the_signature_and_the_docstring_say() -> None:
    function = tool(search).schema["function"]
    assert function["name"] == "search"
    assert function["description"] == "Search the library by words."
    assert function["parameters"] == {
        "type": "object",
        "additionalProperties": False,
        "required": ["query"],
        "properties": {
            "query": {"description": "a few words, or one.", "type": "string"},
            "limit": {"description": "how many.", "type": "integer", "default": 3},
            "order": {"type": "string", "enum": ["new", "old"], "default": "new"},
        },
    }


def test_a_function_that_is_no_tool_is_told_what_it_lacks() -> None:
    def silent(x: int) -> int:
        return x

    def untyped(x) -> int:  # type: ignore[no-untyped-def]
        """Has a parameter without a type."""
        return int(x)

    def many(*x: int) -> int:
        """Has any number of them."""
        return sum(x)

    with pytest.raises(ValueError, match="has no docstring: write one line"):
        tool(silent)
    for fn in (untyped, many):
        with pytest.raises(ValueError, match="expected a name with a type, as in x: str"):
            tool(fn)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("json", '<tool_call>\n{"name": "search", "arguments": {"query": "a </b>", "limit": 2}}\n</tool_call>'),
        (
            "json",
            '<tool_call>{"arguments": "{\\"query\\": \\"a </b>\\", \\"limit\\": 2}", "name": "search"}</tool_call>',
        ),
        (
            "xml",
            "<tool_call>\n<function=search>\n<parameter=query>\na </b>\n</parameter>\n<parameter=limit>2</parameter>\n"
            "</function>\n</tool_call>",
        ),
        ("tags", "<search><query>a </b></query><limit>2</limit></search>"),
    ],
)
def test_one_call_in_every_style(style: Any, text: str) -> None:
    found = parse_calls(f"I look. {text} And then", style, tools=[tool(search)])
    assert found.content == "I look.  And then"
    assert not found.malformed
    [call] = found.calls
    assert call.name == "search"
    assert call.arguments["query"] == "a </b>"
    message = {"tool_calls": [{"function": call._asdict()}]}
    assert answer_calls(message, [tool(search)])[0]["content"] == "a </b> 2 new"


def test_the_first_parameter_may_stand_alone_in_its_tag() -> None:
    [call] = parse_calls("<search>a < b</search>", "tags", tools=[tool(search)]).calls
    assert call == ToolCall("search", {"query": "a < b"})


def test_several_calls_in_their_order_with_a_bad_one_between() -> None:
    one, two = '<tool_call>{"name": "a"}</tool_call>', '<tool_call>{"name": "b", "arguments": {}}</tool_call>'
    found = parse_calls(f"{one}x<tool_call>{{</tool_call>y{two}")
    assert found.calls == [ToolCall("a", {}), ToolCall("b", {})]
    assert found.content == "xy"
    assert len(found.malformed) == 1


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("json", "<tool_call>"),
        ("json", '<tool_call>{"name": "a", "arguments": {"x": 1}'),
        ("json", "<tool_call>[1]</tool_call>"),
        ("json", '<tool_call>{"name": 3}</tool_call>'),
        ("json", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>'),
        ("json", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>'),
        ("json", '<tool_call>{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>"),
        ("json", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("json", "<tool_call>__import__('os').getcwd()</tool_call>"),
        ("xml", "<tool_call>search</tool_call>"),
        ("xml", "<tool_call><function=></function></tool_call>"),
        ("xml", "<tool_call><function=search></tool_call>"),
        ("xml", "<tool_call><function=search><parameter=q>1</function></tool_call>"),
        ("xml", "<tool_call><function=search>1</function></tool_call>"),
        ("tags", "<search>"),
        ("tags", "<search><query>a</search>"),
        ("tags", "<search>a<query>b</query></search>"),
    ],
)
def test_parse_calls_counts_an_unreadable_one_as_malformed(style: Any, text: str) -> None:
    found = parse_calls(text, style, tools=[tool(search)])
    assert not found.calls
    assert len(found.malformed) == 1
    assert found.malformed[0]


TAGS = (
    "<tool_call>",
    "</tool_call>",
    "<search>",
    "</search>",
    "<query>",
    "</query>",
    "<function=search>",
    "</function>",
)
OTHER = (
    "<parameter=q>",
    "</parameter>",
    '{"name": "a", "arguments": {',
    "}",
    '"',
    "1",
    " ",
    "\n",
    "\0",
    "{",
    "[" * 500,
)
PIECES = st.sampled_from([*TAGS, *OTHER])


@given(style=st.sampled_from(["json", "xml", "tags"]), pieces=st.lists(PIECES | st.text(max_size=5), max_size=30))
@settings(max_examples=80, deadline=None)
def test_parse_calls_raises_for_no_text(style: Any, pieces: list[str]) -> None:
    found = parse_calls("".join(pieces), style, tools=[tool(search)])
    calls = [{"function": call._asdict()} for call in found.calls]
    message = {"tool_calls": calls, "malformed_calls": found.malformed}
    answers = answer_calls(message, [tool(search)])
    assert len(answers) == len(found.calls) + len(found.malformed)
    assert all(isinstance(answer["content"], str) for answer in answers)
