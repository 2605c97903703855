"""Programs against tests: standard input and output, calls of a function, and assertions."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeAlias

from rlprims.masking import check_choice
from rlprims.rewards.verifiers._blocks import Blocks, defines, python_code
from rlprims.rewards.verifiers._code_data import Cases, imports_and_helpers, read_cases, read_tests
from rlprims.rewards.verifiers._compare import Compare, same_text, same_value
from rlprims.rewards.verifiers._imported import imported

Checker: TypeAlias = Callable[[Any, Any, Any], bool]


def code_stdin(
    response: str,
    answer: Mapping[str, Any] | str,
    *,
    seconds: float = 5.0,
    total_seconds: float = 8.0,
    memory_mb: int = 512,
    partial: bool = False,
    stop_early: bool | None = None,
    max_cases: int | None = None,
    compare: Compare = "lines",
    tolerance: float = 1e-6,
    checker: Checker | str | None = None,
    blocks: Blocks = "last",
    server: str | None = None,
    allow_unisolated: bool = False,
) -> dict[str, float]:
    """1 if the program gives the expected output for every input; it runs in :mod:`rlprims.rewards.sandbox`.

    The program is the last fenced block of Python (else of no language, else any), else the whole response. The answer
    is ``{"inputs": [text, ...], "outputs": [text, ...]}``, or that as JSON (APPS, TACO, CodeContests). With ``fn_name``
    in it an input is a list of arguments, or a text with one in JSON on each line (LiveCodeBench), and the output the
    value that the function, or the method of a class ``Solution``, returns: tuples count as lists, and ``[x]`` is also
    met by x, as those data sets wrap some. ``prompt``, if it is there, gives imports and helpers that stand before.

    All cases run in one sandbox, each in a process forked for it. ``passed`` is the share of the cases that pass.

    Args:
        response: what the model wrote.
        answer: the cases.
        seconds: wall and CPU time of each case.
        total_seconds: wall time of all; what does not run in it fails. Keep it below the pool's ``seconds``: a row that
            the pool ends has no score.
        memory_mb: address space of each process.
        partial: the score is the share.
        stop_early: end at the first failure; None: unless ``partial``.
        max_cases: only the first cases.
        compare: ``lines``: equal up to space at their ends and empty lines at the end; ``tokens``: equal words;
            ``floats``: words that are numbers x, y need \\|x − y\\| <= tolerance max(1, \\|y\\|).
        tolerance: of ``floats``.
        checker: a function (input, output, expected) to bool, or its import path, which decides in place of
            ``compare``. It must accept what is expected; where it raises on an output, that case fails.
        blocks: ``last``, or ``joined``: all the Python blocks, one after the other.
        server: URL of a SandboxFusion server's ``run_code``, to run there and not here.
        allow_unisolated: see :func:`rlprims.rewards.sandbox.run`.

    Raises:
        ValueError: the answer has no cases, or ones that cannot be tested; an option that does not fit.
        IsolationError: the kernel offers no isolation, and ``allow_unisolated`` is not set.
    """
    check_choice("compare", compare, Compare)
    check_choice("blocks", blocks, Blocks)
    if not 0 < seconds <= total_seconds:
        raise ValueError(f"expected 0 < seconds <= total_seconds, got {seconds} and {total_seconds}; raise the latter")
    if max_cases is not None and max_cases < 1:
        raise ValueError(f"expected max_cases of 1 or more, got {max_cases}; use None for all")
    cases = read_cases(answer, max_cases)
    matches = _judge(cases, compare, tolerance, checker)
    code = python_code(response, blocks, cases.function)
    if server is not None:
        outputs = _on_server(server, cases, code or response, seconds, memory_mb)
    else:
        from rlprims.rewards import sandbox

        limits = sandbox.Limits(seconds=seconds, memory_mb=memory_mb)
        outputs = sandbox.run_cases(
            code or response,
            cases.inputs,
            function=cases.function,
            before=cases.before,
            limits=limits,
            total_seconds=total_seconds,
            allow_unisolated=allow_unisolated,
        )
    passed = 0
    with closing(outputs):
        for given, expected, result in zip(cases.inputs, cases.outputs, outputs, strict=False):
            good = result.ok and matches(given, result.output, expected)
            passed += good
            if not good and (not partial if stop_early is None else stop_early):
                break
    share = passed / len(cases.inputs)
    return {"score": share if partial else float(share == 1), "acc": float(share == 1), "passed": share}


def code_asserts(
    response: str,
    answer: Mapping[str, Any] | Sequence[str] | str,
    *,
    seconds: float = 5.0,
    memory_mb: int = 512,
    blocks: Blocks = "last",
    allow_unisolated: bool = False,
) -> dict[str, float]:
    """1 if the tests pass on the functions that the response defines; both run in :mod:`rlprims.rewards.sandbox`.

    The code is the last fenced block of Python that defines the function, else the last one; without a block it is the
    whole response. The answer is one of these, or it as JSON:

    - statements with asserts, as a text or a list;
    - ``{"test": statements, "prompt": code before the response, "entry_point": name}`` (HumanEval: its ``check`` is
      called with the function of that name). The prompt's imports and helpers stand before a block too;
    - a row of MBPP: ``test_list``, and if they are there ``test_imports``, ``test_setup_code``, and ``code``, the
      solution, which tells what the function is called.

    The tests run in a process of their own, in another sandbox, and each call of a tested function crosses over as
    plain data: None, bool, int, float, complex, text, bytes, list, tuple, set, dict. So nothing that the response does
    (ending the process, printing "passed", objects equal to everything, patched builtins, exceptions that Python
    swallows) can touch the verdict. The entry point must be defined and called. Functions that return other objects
    cannot be tested so, and changes to an argument are not seen.

    Raises:
        ValueError: the answer has no test, or ones that are no Python, test nothing of the response, or give a function
            what is no plain data.
        IsolationError: the kernel offers no isolation, and ``allow_unisolated`` is not set.
    """
    check_choice("blocks", blocks, Blocks)
    tests = read_tests(answer)
    from rlprims.rewards import sandbox

    name = tests.functions[0] if tests.functions else None
    code = python_code(response, blocks, name)
    whole = code is not None and (name is None or defines(code, name))
    # A completion goes on where the prompt ends; a block that defines the function comes after imports and helpers.
    passed = sandbox.run_tests(
        code if whole and code is not None else tests.prompt + (code or response),
        tests.text,
        before=imports_and_helpers(tests.prompt, name) if whole else "",
        setup=tests.prompt,
        functions=tests.functions,
        limits=sandbox.Limits(seconds=seconds, memory_mb=memory_mb),
        allow_unisolated=allow_unisolated,
    ).ok
    return {"score": float(passed), "acc": float(passed)}


def _judge(cases: Cases, compare: Compare, tolerance: float, checker: Checker | str | None) -> Checker:
    if checker is None:
        same = same_text if cases.function is None else same_value
        return lambda given, output, expected: same(output, expected, compare, tolerance)
    function = imported(checker) if isinstance(checker, str) else checker
    if not function(cases.inputs[0], cases.outputs[0], cases.outputs[0]):
        raise ValueError(
            "the checker refuses the first case's expected output; it is called with (input, output, expected)"
        )

    def matches(given: Any, output: Any, expected: Any) -> bool:
        try:
            return bool(function(given, output, expected))
        except Exception:  # it reads what a model's program wrote
            return False

    return matches


def _on_server(url: str, cases: Cases, program: str, seconds: float, memory_mb: int) -> Generator[Any, None, None]:
    from rlprims.rewards import sandbox, sandbox_fusion

    text = f"{cases.before}\n{program}" if cases.before else program
    for given in cases.inputs:
        if cases.function is not None:
            limits: dict[str, Any] = {"seconds": seconds, "memory_mb": memory_mb}
            yield sandbox_fusion.call(url, text, cases.function, given, **limits)
            continue
        result = sandbox_fusion.run(url, text, stdin=given, seconds=seconds, memory_mb=memory_mb)
        yield sandbox.CaseResult(result.status, result.code, result.stdout)
