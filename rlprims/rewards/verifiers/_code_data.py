"""Cases and tests of code in the forms of data sets, read before a program runs. Wrong data raise ``ValueError``."""

import ast
import builtins
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlprims.rewards.sandbox._start import defined_names, used_names
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


def read_cases(answer: Mapping[str, Any] | Sequence[Any] | str, max_cases: int | None) -> Cases:
    """The cases of an answer in the form of APPS and TACO, CodeContests, LiveCodeBench or Codeforces."""
    found = _loads(answer) if isinstance(answer, str) else answer
    found = found if isinstance(found, Mapping) else {"cases": found}
    inputs, outputs = _inputs_and_outputs(found)
    lists = all(isinstance(x, Sequence) and not isinstance(x, str) for x in (inputs, outputs))
    if not lists or not inputs or not outputs or len(inputs) != len(outputs):
        raise ValueError("expected inputs and outputs in the answer: lists of the same length, at least one case")
    metadata = found.get("metadata") or {}
    metadata = _loads(metadata) if isinstance(metadata, str) else metadata
    name = found.get("fn_name") or metadata.get("func_name") or None
    before = imports_and_helpers(str(found.get("prompt") or ""), name)
    pairs = list(zip(inputs, outputs, strict=True))[:max_cases]
    if name is None:
        return Cases([_text(x, "inputs") for x, _ in pairs], [_text(y, "outputs") for _, y in pairs], None, before)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"expected the name of a function in fn_name, got {name!r}")
    return Cases([_arguments(x) for x, _ in pairs], [_value(y, x) for x, y in pairs], name, before)


_PARTS = (
    *("public_tests", "private_tests", "generated_tests"),  # CodeContests
    *("public_test_cases", "private_test_cases"),  # LiveCodeBench
    *("official_tests", "cases"),  # Codeforces, and a list of cases alone
)


def _inputs_and_outputs(found: Mapping[str, Any]) -> tuple[Any, Any]:
    """``inputs`` and ``outputs``, or those of all parts: mappings with ``input`` and ``output``, or lists of such."""
    if "inputs" in found or "outputs" in found:
        return found.get("inputs"), found.get("outputs")
    inputs: list[Any] = []
    outputs: list[Any] = []
    for part in [found, *(found[name] for name in _PARTS if found.get(name))]:
        if isinstance(part, str):
            part = _loads(part)  # LiveCodeBench's private cases are a pickle, which raises here
        for case in part if isinstance(part, Sequence) else [part]:
            given, expected = (case.get("input"), case.get("output")) if isinstance(case, Mapping) else (None, None)
            if isinstance(part, Mapping) and isinstance(given, list) and isinstance(expected, list):
                inputs += given
                outputs += expected
            elif given is not None and expected is not None:
                inputs.append(given)
                outputs.append(expected)
    return inputs, outputs


def read_tests(answer: Mapping[str, Any] | Sequence[str] | str, packages: Sequence[str] = ()) -> Tests:
    """The tests of an answer in HumanEval's or MBPP's form, or given as statements."""
    if isinstance(answer, str):
        answer = _loads(answer) if answer.lstrip().startswith(("{", '["')) else {"test": answer}
    if not isinstance(answer, Mapping):
        answer = {"test_list": answer}
    prompt, name = str(answer.get("prompt") or ""), answer.get("entry_point") or None
    text = answer.get("test") or ""
    text = text if isinstance(text, str) else "\n".join(text)
    if "test_list" in answer:  # MBPP's prompt is a sentence; MBPP+ has further tests in test
        setup = [*(answer.get("test_imports") or ()), answer.get("test_setup_code") or ""]
        listed, prompt = list(answer["test_list"] or ()), ""
        text = "\n".join([*setup, *listed, text]) if listed or text.strip() else ""
    if not text.strip():
        raise ValueError("expected tests in the answer: statements with assert, or 'test' or 'test_list' in a mapping")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"the answer's tests are not Python: {error}") from None
    _check_imports(tree, packages)
    solution, own = str(answer.get("code") or ""), defined_names(tree)
    _check_no_class(tree, name, (_defined_in(prompt, ast.ClassDef) | _defined_in(solution, ast.ClassDef)) - own)
    if name and any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
        return Tests(f"{text}\n\ncheck({name.replace('().', '_')})\n", prompt, [name])
    if name:
        return Tests(text, prompt, [name])
    used = used_names(tree)
    functions = sorted(used & _defined_in(solution) - own)
    if not functions and not used - own - _defined_in(prompt) - set(dir(builtins)):
        raise ValueError(
            "the answer's tests call no function of the response; give the name of the tested function as entry_point, "
            "or the data set's solution as code"
        )
    return Tests(text, prompt, functions)


def _check_imports(tree: ast.AST, packages: Sequence[str]) -> None:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in (name.partition(".")[0] for name in names):
            if name not in sys.stdlib_module_names and name not in packages:
                raise ValueError(
                    f"the answer's tests import {name}, and the sandbox has no {name}: set packages={[*packages, name]}"
                )


def _check_no_class(tree: ast.AST, name: str | None, classes: set[str]) -> None:
    """A class can be tested only by one method, as ``Solution().add``: its objects stay in the program's sandbox."""
    if name and not re.fullmatch(r"\w+(?:\(\)\.\w+)?", name):
        raise ValueError(f"expected a function or Class().method as entry_point, got {name!r}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
            raise ValueError(
                f"the answer's tests make objects of the response's class {node.func.id}, and only plain data can be "
                "given to the tests: give one method as entry_point, Class().method"
            )


def imports_and_helpers(prompt: str, name: str | None) -> str:
    """The code of the prompt without the requested function or class; empty if the prompt is not Python."""
    name = name and name.partition("().")[0]
    for text in (prompt, _until(prompt, name)):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        other = [node for node in tree.body if getattr(node, "name", "") != (name or " ")]
        return "\n".join(ast.unparse(node) for node in other)
    return ""


def _until(prompt: str, name: str | None) -> str:
    lines = prompt.splitlines()
    end = next((i for i, line in enumerate(lines) if name and defines(line, name)), len(lines))
    return "\n".join(lines[:end])


def _defined_in(code: str, kind: Any = ast.FunctionDef | ast.ClassDef) -> set[str]:
    """The functions and classes at the top level of a program."""
    try:
        return {node.name for node in ast.parse(code).body if isinstance(node, kind)}
    except (SyntaxError, ValueError):
        return set()


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
