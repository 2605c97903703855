"""See :func:`code_stdin`, :func:`code_asserts`."""

import json
from collections.abc import Mapping
from typing import Any

from rlprims.rewards.verifiers._tags import fenced


def code_stdin(
    response: str,
    answer: Mapping[str, Any] | str,
    *,
    seconds: float = 5.0,
    memory_mb: int = 512,
    partial: bool = False,
    server: str | None = None,
    allow_unisolated: bool = False,
) -> dict[str, float]:
    """1 if the program prints the expected output for every input; it runs in :mod:`rlprims.rewards.sandbox`.

    The program is the last fenced block, else the whole response. The answer is ``{"inputs": [text, ...],
    "outputs": [text, ...]}``, or that as JSON (the form of APPS, TACO and CodeContests). Outputs are equal if their
    lines are, up to space at the end of each and empty lines at the end. ``passed`` is the share of the cases; it is
    the score with ``partial``, and then all cases run; else the first failure ends it.

    Args:
        response: what the model wrote.
        answer: the cases.
        seconds: wall and CPU time of each case.
        memory_mb: address space of each process.
        partial: score the share of cases.
        server: URL of a SandboxFusion server's ``run_code``, to run there and not here.
        allow_unisolated: see :func:`rlprims.rewards.sandbox.run`.

    Raises:
        ValueError: the answer has no cases, or not an output for each input.
        IsolationError: the kernel offers no isolation, and ``allow_unisolated`` is not set.
    """
    cases = json.loads(answer) if isinstance(answer, str) else answer
    inputs, outputs = cases.get("inputs"), cases.get("outputs")
    if not inputs or not outputs or len(inputs) != len(outputs):
        raise ValueError("answer needs inputs and outputs, lists of texts of one length, at least one of each")
    program = fenced(response) or response
    passed = 0
    for given, expected in zip(inputs, outputs, strict=True):
        if server is not None:
            from rlprims.rewards import sandbox_fusion

            result = sandbox_fusion.run(server, program, stdin=given, seconds=seconds, memory_mb=memory_mb)
        else:
            from rlprims.rewards import sandbox

            limits = sandbox.Limits(seconds=seconds, memory_mb=memory_mb)
            result = sandbox.run(program, stdin=given, limits=limits, allow_unisolated=allow_unisolated)
        right = result.ok and _lines(result.stdout) == _lines(expected)
        passed += right
        if not right and not partial:
            break
    share = passed / len(inputs)
    return {"score": share if partial else float(share == 1), "acc": float(share == 1), "passed": share}


def code_asserts(
    response: str,
    answer: Mapping[str, str] | str,
    *,
    seconds: float = 5.0,
    memory_mb: int = 512,
    allow_unisolated: bool = False,
) -> dict[str, float]:
    """1 if the tests pass on the functions that the response defines; both run in :mod:`rlprims.rewards.sandbox`.

    The code is the last fenced block, else the whole response. The answer is statements with asserts (MBPP), or
    ``{"test": statements, "prompt": code before the response, "entry_point": name}`` (HumanEval: its ``check`` is
    called with the function of that name), or that as JSON.

    The tests run in a process of their own, in another sandbox, and each call of a tested function crosses over as
    plain data: None, bool, int, float, complex, text, bytes, list, tuple, set, dict. So nothing that the response does
    (ending the process, printing "passed", objects equal to everything, patched builtins) can touch the verdict.
    Functions that take or return other objects cannot be tested so, and neither can changes to an argument be seen.

    Raises:
        ValueError: the answer has no test.
        IsolationError: the kernel offers no isolation, and ``allow_unisolated`` is not set.
    """
    from rlprims.rewards import sandbox

    parts = _parts(answer)
    prompt, name = parts.get("prompt", ""), parts.get("entry_point")
    code = fenced(response)
    # A completion goes on where the prompt ends; a fenced block that defines the function stands for itself.
    program = code if code is not None and (not name or f"def {name}" in code) else prompt + (code or response)
    tests = parts["test"] + (f"\n\ncheck({name})\n" if name and "def check" in parts["test"] else "")
    limits = sandbox.Limits(seconds=seconds, memory_mb=memory_mb)
    passed = sandbox.run_tests(
        program,
        tests,
        setup=prompt,
        functions=[name] if name else [],
        limits=limits,
        allow_unisolated=allow_unisolated,
    ).ok
    return {"score": float(passed), "acc": float(passed)}


def _parts(answer: Mapping[str, str] | str) -> Mapping[str, str]:
    if isinstance(answer, str):
        answer = json.loads(answer) if answer.lstrip().startswith("{") else {"test": answer}
    if not answer.get("test"):
        raise ValueError("answer needs tests: statements with assert, or a mapping with 'test'")
    return answer


def _lines(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip().split("\n")
