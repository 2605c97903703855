"""Verifiers of programs: by standard input and output, by calls of a function, and by assertions."""

import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeAlias

from rlprims.masking import check_choice
from rlprims.rewards._columns import imported
from rlprims.rewards.verifiers._blocks import Blocks, defines, python_code
from rlprims.rewards.verifiers._code_data import Cases, imports_and_helpers, read_cases, read_tests
from rlprims.rewards.verifiers._compare import Compare, same_text, same_value

Checker: TypeAlias = Callable[[Any, Any, Any], bool]
Run: TypeAlias = Callable[..., Iterable[Any]]


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
    packages: Sequence[str] = (),
    run: Run | str | Mapping[str, Any] | None = None,
    allow_unisolated: bool = False,
) -> dict[str, float]:
    """1 if the program gives the expected output for every input; it runs in :mod:`rlprims.rewards.sandbox`.

    The program is the last fenced block of Python that reads input or defines the function, else the last one (else of
    no language, else any), else the whole response. The answer is ``{"inputs": [text, ...], "outputs": [text, ...]}``,
    or that as JSON (APPS, TACO); a row of CodeContests, LiveCodeBench or Codeforces with its tests; or a list of
    ``{"input": text, "output": text}``. If it has ``fn_name``, an input is a list of arguments, or a text with an
    argument in JSON on each line (LiveCodeBench). The output is then the value that the function, or the method of a
    class ``Solution``, returns. Tuples equal lists, and x is accepted for ``[x]``, because those data sets wrap some
    values. The imports and helpers of ``prompt``, if the answer has it, are put before the program, and names of the
    standard library that it uses without an import are imported, as the harnesses of those data sets do.

    All cases run in one sandbox, each in a forked process. ``passed`` is the share of the cases that pass.

    Args:
        seconds: wall and CPU time of each case.
        total_seconds: wall time of all cases; the cases after it fail. Keep it below the pool's ``seconds``: a row that
            the pool ends has no score.
        memory_mb: address space of each process.
        partial: the score is the share of cases that pass.
        stop_early: stop at the first failure; None: stop unless ``partial``.
        max_cases: use only the first cases.
        compare: ``lines``: equal except for space at the ends of lines and empty lines at the end; ``tokens``: equal
            words; ``floats``: words that are numbers x, y need \\|x − y\\| <= tolerance max(1, \\|y\\|).
        tolerance: the tolerance of ``floats``.
        checker: a function (input, output, expected) to bool, or its import path, instead of ``compare``. It must
            accept the expected output. If it raises on an output, that case fails.
        blocks: ``last``, or ``joined``: all Python blocks, one after the other.
        packages: packages of this environment that the program can import, such as ``numpy``; read-only.
        run: a function that runs the program elsewhere, such as on a server: ``run(program, inputs, function=...,
            seconds=..., total_seconds=..., memory_mb=...)`` yields a :class:`rlprims.rewards.sandbox.CaseResult` for
            each input, in order. Its import path, or ``{"fn": path, "url": ...}`` with arguments of its own.
        allow_unisolated: see :func:`rlprims.rewards.sandbox.run`.

    Raises:
        ValueError: the answer has no cases, or cases that cannot be tested; a wrong option.
        IsolationError: the kernel offers no isolation, and ``allow_unisolated`` is not set.
    """
    check_choice("compare", compare, Compare)
    check_choice("blocks", blocks, Blocks)
    if not 0 < seconds <= total_seconds:
        raise ValueError(f"expected 0 < seconds <= total_seconds, got {seconds} and {total_seconds}; raise the latter")
    if max_cases is not None and max_cases < 1:
        raise ValueError(f"expected max_cases of 1 or more, got {max_cases}; use None for all")
    cases = read_cases(answer, max_cases)
    is_correct = _checker(cases, compare, tolerance, checker)
    code = python_code(response, blocks, cases.function, reads=cases.function is None and any(cases.inputs))
    if run is not None:
        if packages or allow_unisolated:
            raise ValueError("packages and allow_unisolated are of the sandbox here: leave them out beside run")
        given = {"seconds": seconds, "total_seconds": total_seconds, "memory_mb": memory_mb}
        outputs = _elsewhere(run, cases, code or response, given)
    else:
        from rlprims.rewards import sandbox

        # Room for the largest expected output, and for one that is wrong.
        most = max(2**20, *(2 * len(str(expected).encode("utf-8", "replace")) for expected in cases.outputs))
        limits = sandbox.Limits(seconds=seconds, memory_mb=memory_mb, output_bytes=most)
        outputs = sandbox.run_cases(
            code or response,
            cases.inputs,
            function=cases.function,
            before=cases.before,
            standard_imports=True,
            packages=packages,
            limits=limits,
            total_seconds=total_seconds,
            allow_unisolated=allow_unisolated,
        )
    passed = 0
    with closing(outputs):
        for case, expected, result in zip(cases.inputs, cases.outputs, outputs, strict=False):
            passes = result.ok and is_correct(case, result.output, expected)
            passed += passes
            if not passes and (not partial if stop_early is None else stop_early):
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
    packages: Sequence[str] = (),
    allow_unisolated: bool = False,
) -> dict[str, float]:
    """1 if the tests pass on the functions that the response defines; both run in :mod:`rlprims.rewards.sandbox`.

    The code is the last fenced block of Python that defines the function, else the last one; without a block it is the
    whole response. The answer is one of these, or one of these as JSON:

    - statements with asserts, as a text or a list;
    - ``{"test": statements, "prompt": code before the response, "entry_point": name}`` (HumanEval: its ``check`` is
      called with the function of that name, or with the method that ``Solution().add`` names). The prompt's imports and
      helpers are put before a block too;
    - a row of MBPP: ``test_list``, and optionally ``test`` (the further tests of MBPP+), ``test_imports``,
      ``test_setup_code``, and ``code``, the solution, from which the name of the function is read.

    Test cases of ``unittest`` run after the statements. Tests and response can import the standard library, and the
    ``packages`` of this environment, such as ``numpy`` for HumanEval+ and MBPP+; they are read-only.

    The tests run in a second sandbox. Arguments and results of the tested functions are exchanged as plain data: None,
    bool, int, float, complex, text, bytes, list, tuple, set, dict. The response therefore cannot change the result of
    the tests, for example by ending the process, printing "passed", objects equal to everything, patched builtins, or
    exceptions that Python catches. The entry point must be defined and called. Functions that return other objects
    cannot be tested, and changes to an argument have no effect on the tests.

    Raises:
        ValueError: the answer has no test, or its tests are not Python, do not call a function of the response, import
            what the sandbox does not have, make objects of the response's classes, or pass other than plain data.
        IsolationError: the kernel offers no isolation, and ``allow_unisolated`` is not set.
    """
    check_choice("blocks", blocks, Blocks)
    tests = read_tests(answer, packages)
    from rlprims.rewards import sandbox

    name = tests.functions[0] if tests.functions else None
    code = python_code(response, blocks, name and name.partition("().")[0])
    is_complete = code is not None and (name is None or defines(code, name.partition("().")[0]))
    # A completion continues the prompt. A block that defines the function needs only the prompt's imports and helpers.
    passed = sandbox.run_tests(
        code if is_complete and code is not None else tests.prompt + (code or response),
        tests.text,
        before=imports_and_helpers(tests.prompt, name) if is_complete else "",
        setup=tests.prompt,
        functions=tests.functions,
        packages=packages,
        limits=sandbox.Limits(seconds=seconds, memory_mb=memory_mb),
        allow_unisolated=allow_unisolated,
    ).ok
    return {"score": float(passed), "acc": float(passed)}


def _checker(cases: Cases, compare: Compare, tolerance: float, checker: Checker | str | None) -> Checker:
    if checker is None:
        same = same_text if cases.function is None else same_value
        return lambda case, output, expected: same(output, expected, compare, tolerance)
    function = imported(checker) if isinstance(checker, str) else checker
    if not function(cases.inputs[0], cases.outputs[0], cases.outputs[0]):
        raise ValueError(
            "the checker returns False for the first case's expected output, expected True: it is called with (input, "
            "output, expected)"
        )

    def is_correct(case: Any, output: Any, expected: Any) -> bool:
        try:
            return bool(function(case, output, expected))
        except Exception:  # the output comes from the model's program and may have any form
            return False

    return is_correct


def check_run(run: Run | str | Mapping[str, Any]) -> Run:
    """The function that ``run`` names, with its own arguments.

    Raises:
        ValueError: there is no such function, or it does not take what it is called with.
    """
    own = dict(run) if isinstance(run, Mapping) else {"fn": run}
    fn: Any = own.pop("fn", None)
    try:
        function: Run = imported(fn) if isinstance(fn, str) else fn
        inspect.signature(function).bind("", [], function="", seconds=1.0, total_seconds=1.0, memory_mb=1, **own)
    except TypeError as error:
        raise ValueError(
            f"run: {error}: expected a function of (program, inputs, *, function, seconds, total_seconds, memory_mb) "
            "and of what stands beside fn"
        ) from None
    return functools.partial(function, **own)


def _elsewhere(run: Any, cases: Cases, program: str, limits: Mapping[str, Any]) -> Generator[Any, None, None]:
    from rlprims.rewards.sandbox._start import IMPORTS

    text = f"{cases.before}\n{program}" if cases.before else program
    # A program that imports from __future__ must begin so.
    text = text if "__future__" in program else f"{IMPORTS}\n{text}"
    yield from check_run(run)(text, cases.inputs, function=cases.function, **limits)
