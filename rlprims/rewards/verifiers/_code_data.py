"""Cases and tests of code in the forms of data sets, read before a program runs. Wrong data raise ``ValueError``."""

import ast
import builtins
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlprims.rewards.verifiers._blocks import defines


class Cases(NamedTuple):
    """Inputs and expected outputs: texts, or with ``function`` its arguments and return values."""

    inputs: list[Any]
    outputs: list[Any]
    function: str | None
    before: str


class Tests(NamedTuple):
    """Statements with asserts."""

    text: str
    prompt: str
    functions: list[str]
    """The functions that the response must define, if they are known."""


def read_cases(answer: Mapping[str, Any] | str, max_cases: int | None) -> Cases:
    """The cases of an answer in the form of APPS, TACO and CodeContests."""
    found = _loads(answer) if isinstance(answer, str) else answer
    inputs, outputs = (found.get("inputs"), found.get("outputs")) if isinstance(found, Mapping) else (None, None)
    lists = all(isinstance(x, Sequence) and not isinstance(x, str) for x in (inputs, outputs))
    if not lists or not inputs or not outputs or len(inputs) != len(outputs):
        raise ValueError(
            "expected inputs and outputs in the answer: two lists of the same length, with at least one case"
        )
    name = found.get("fn_name") or None
    before = imports_and_helpers(str(found.get("prompt") or ""), name)
    pairs = list(zip(inputs, outputs, strict=True))[:max_cases]
    if name is None:
        return Cases([_text(x, "inputs") for x, _ in pairs], [_text(y, "outputs") for _, y in pairs], None, before)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"expected the name of a function in fn_name, got {name!r}")
    return Cases([_arguments(x) for x, _ in pairs], [_value(y, x) for x, y in pairs], name, before)


def read_tests(answer: Mapping[str, Any] | Sequence[str] | str) -> Tests:
    """The tests of an answer in HumanEval's or MBPP's form, or given as statements."""
    if isinstance(answer, str):
        answer = _loads(answer) if answer.lstrip().startswith(("{", '["')) else {"test": answer}
    if not isinstance(answer, Mapping):
        answer = {"test_list": answer}
    prompt, name = str(answer.get("prompt") or ""), answer.get("entry_point") or None
    if "test_list" in answer:  # MBPP's prompt is a sentence
        setup = [*(answer.get("test_imports") or ()), answer.get("test_setup_code") or ""]
        listed, prompt = list(answer["test_list"] or ()), ""
        text = "\n".join([*setup, *listed]) if listed else ""
    else:
        text = answer.get("test") or ""
        text = text if isinstance(text, str) else "\n".join(text)
    if not text.strip():
        raise ValueError(
            "expected tests in the answer: statements with assert, or a mapping with 'test' or 'test_list'"
        )
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"the answer's tests are not Python: {error}") from None
    if name and any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
        return Tests(f"{text}\n\ncheck({name})\n", prompt, [name])
    if name:
        return Tests(text, prompt, [name])
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    own = _defined(tree)
    solution = _defined_in(str(answer.get("code") or ""))
    functions = sorted(used & solution - own)
    if not functions and not used - own - _defined_in(prompt) - set(dir(builtins)):
        raise ValueError(
            "the answer's tests call no function of the response; give the name of the tested function as entry_point, "
            "or the data set's solution as code"
        )
    return Tests(text, prompt, functions)


def imports_and_helpers(prompt: str, name: str | None) -> str:
    """The code of the prompt without the requested function; empty if the prompt is not Python."""
    for text in (prompt, _until(prompt, name)):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        other = [node for node in tree.body if not (isinstance(node, ast.FunctionDef) and node.name == name)]
        return "\n".join(ast.unparse(node) for node in other)
    return ""


def _until(prompt: str, name: str | None) -> str:
    lines = prompt.splitlines()
    end = next((i for i, line in enumerate(lines) if name and defines(line, name)), len(lines))
    return "\n".join(lines[:end])


def _defined(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
    return found


def _defined_in(code: str) -> set[str]:
    """The functions and classes at the top level of a program."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError):
        return set()
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the answer is not JSON: {error}") from None


def _text(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise ValueError(f"expected texts in {name}, got {value!r:.100}; with fn_name they are arguments and values")


def _arguments(value: Any) -> list[Any]:
    """The arguments as a list, from a list or from a text with a line of JSON for each (LiveCodeBench)."""
    if isinstance(value, str):
        return [_loads(line) for line in value.splitlines()]
    if not isinstance(value, Sequence):
        raise ValueError(f"expected the arguments of fn_name as a list, got {value!r:.100}")
    return list(value)


def _value(value: Any, arguments: Any) -> Any:
    return _loads(value) if isinstance(value, str) and isinstance(arguments, str) else value
