"""Isolated execution of Python programs that a model wrote.

:func:`run` runs a program once, :func:`run_cases` runs it on many inputs, and :func:`run_tests` tests its functions.

The isolation consists of Linux namespaces (no network; no files except the system's libraries and Python, read-only;
its own process tree, which is killed as a whole), resource limits, and an empty environment. If the kernel does not
provide namespaces, programs are not run, unless ``allow_unisolated=True``: then only the limits hold. The sandbox is
not a virtual machine: it does not protect against bugs of the kernel.
"""

import contextlib
import json
import socket
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rlprims.rewards.sandbox import _values
from rlprims.rewards.sandbox._guest import Guest, IsolationError, Limits, Result, choose, isolation, wait_for

__all__ = ["CaseResult", "IsolationError", "Limits", "Result", "isolation", "run", "run_cases", "run_tests"]

_HERE = Path(__file__).parent
_UNTESTABLE = 97


def run(
    program: str,
    *,
    stdin: str = "",
    packages: Sequence[str] = (),
    limits: Limits | None = None,
    allow_unisolated: bool = False,
) -> Result:
    """Run a Python program within the limits, and remove its processes and files afterwards.

    The program can use the standard library, an empty writable directory, and the ``packages`` of this environment,
    such as ``numpy``, which are read-only. ``isolation`` of the result is the kind of isolation.

    Raises:
        IsolationError: this machine offers no isolation, and ``allow_unisolated`` is not set.

    >>> run("print(int(input()) ** 2)", stdin="12").stdout  # doctest: +SKIP
    '144\\n'
    """
    isolate = choose(allow_unisolated)
    files = _files("_program", program=program)
    with Guest(files, limits or Limits(), isolate=isolate, stdin=stdin, packages=packages) as guest:
        return guest.wait()


def _files(main: str, **texts: str) -> dict[str, str]:
    """The files of a sandbox: its main program, what all of them import, and the texts that it reads."""
    names = {"main.py": f"{main}.py", "_start.py": "_start.py", "_values.py": "_values.py"}
    own = {target: (_HERE / source).read_text() for target, source in names.items()}
    return own | {f"{name}.py": text for name, text in texts.items()}


def run_tests(
    program: str,
    tests: str,
    *,
    before: str = "",
    setup: str = "",
    functions: Sequence[str] = (),
    packages: Sequence[str] = (),
    limits: Limits | None = None,
    allow_unisolated: bool = False,
) -> Result:
    """Run tests against a program's functions; ``ok`` of the result is True if all tests ran to the end.

    Program and tests run in two sandboxes. The tests are trusted code. They get only plain data from the program, so
    that the program cannot forge the result. Names that the tests use and do not define are functions of the program.
    ``setup`` is code for the tests; if it defines a function that is to be tested, name it in ``functions``. There
    ``Solution().add`` is a method of a new object; the tests call it ``Solution_add``. Both can import ``packages``.

    Raises:
        IsolationError: as for :func:`run`.
    """
    isolate, limits = choose(allow_unisolated), limits or Limits()
    ours, theirs = socket.socketpair()
    tested = _files("_functions", before=before, program=program)
    testing = _files("_tests", setup=setup, tests=tests) | {"names.txt": "\n".join(functions)}
    start: dict[str, Any] = {"isolate": isolate, "packages": packages}
    with (
        ours,
        theirs,
        Guest(tested, limits, channel=theirs, **start) as answering,
        Guest(testing, limits, channel=ours, **start) as asking,
    ):
        ours.close()
        theirs.close()
        program_ended = False
        while True:
            waiting = (asking,) if program_ended else (asking, answering)
            ready = wait_for(*waiting)
            if not program_ended:
                program_ended = answering.step(ready)
                if program_ended:
                    answering.result()  # kills its processes, so that the tests read the end of the channel
                if not answering.ready:
                    asking.deadline = time.monotonic() + limits.seconds  # the tests' time starts when both are ready
            if asking.step(ready):
                result = asking.result()
                if result.status == "finished" and result.code == _UNTESTABLE:
                    raise ValueError(result.stderr.strip())
                return result


class CaseResult(NamedTuple):
    """The result of a program on one case."""

    status: str
    """``finished``, ``signal``, ``timeout`` or ``output limit``."""
    code: int | None
    """The exit code, or the number of the signal."""
    output: Any
    """The text that it printed, or the value that the function returned."""

    @property
    def ok(self) -> bool:
        return self.status == "finished" and self.code == 0


def run_cases(
    program: str,
    cases: Sequence[Any],
    *,
    function: str | None = None,
    before: str = "",
    standard_imports: bool = False,
    packages: Sequence[str] = (),
    limits: Limits | None = None,
    total_seconds: float = 60.0,
    allow_unisolated: bool = False,
) -> Generator[CaseResult, None, None]:
    """Run a program on each case in one sandbox, and yield the results in order; closing the generator ends it.

    The program is compiled once, and a process is forked for each case, so that a case that hangs or crashes does not
    affect the others. Files in the program's folder are kept between cases.

    Args:
        cases: texts of stdin; with ``function``, sequences of its arguments, plain data.
        function: the name of the program's function, or of the method of its class ``Solution``, to call.
        before: code to put before the program: imports, helpers.
        standard_imports: names of the standard library that the program uses and does not define are imported, as the
            harnesses of APPS, TACO and LiveCodeBench do: ``List``, ``deque``, ``math``, ...
        packages: packages of this environment that the program can import; read-only.
        limits: the limits of each case; ``disk_mb``, ``files`` and ``processes`` are limits of all cases together.
        total_seconds: wall time of all cases; the remaining cases then have the status ``timeout``.
        allow_unisolated: see :func:`run`.

    Raises:
        IsolationError: as for :func:`run`.

    >>> [case.output for case in run_cases("print(2 * int(input()))", ["3", "4"])]  # doctest: +SKIP
    ['6\\n', '8\\n']
    """
    files = _files("_cases", before=before, program=program)
    files["options.json"] = json.dumps({"standard_imports": standard_imports, "packages": list(packages)})
    start: dict[str, Any] = {"isolate": choose(allow_unisolated), "packages": packages}
    return _run_cases(files, cases, function, limits or Limits(), total_seconds, start)


def _run_cases(
    files: dict[str, str], cases: Sequence[Any], name: str | None, limits: Limits, seconds: float, start: dict[str, Any]
) -> Generator[CaseResult, None, None]:
    ours, theirs = socket.socketpair()
    total_limits = replace(limits, seconds=seconds)
    with ours, theirs, Guest(files, total_limits, channel=theirs, **start) as guest:
        theirs.close()
        while not guest.ready:
            if guest.step(wait_for(guest)):
                guest.result()  # raises if the sandbox did not start
                break
        replies = ours.makefile("rb")
        stopped: CaseResult | None = None  # the result of all further cases, once no more can run
        for case in cases:
            left = guest.deadline - time.monotonic()
            if stopped is None and left <= 0:
                stopped = CaseResult("timeout", None, None)
            if stopped is None:
                request: dict[str, Any] = {"seconds": min(limits.seconds, left), "output_bytes": limits.output_bytes}
                if name is None:
                    request["stdin"] = case
                else:
                    request |= {"function": name, "arguments": _values.pack(list(case))}
                ours.settimeout(left)
                try:
                    ours.sendall(json.dumps(request).encode() + b"\n")
                    result = _reply(replies, limits, name)
                except TimeoutError:
                    stopped = CaseResult("timeout", None, None)
                except (OSError, ValueError, TypeError, RecursionError):  # the program has ended the process of cases
                    stopped = CaseResult("signal", None, None)
            yield stopped if stopped is not None else result


def _reply(replies: Any, limits: Limits, function: str | None) -> CaseResult:
    how, code, size = json.loads(replies.readline(1000))
    if not isinstance(size, int) or not 0 <= size <= limits.output_bytes:
        raise ValueError(f"{size} bytes")
    output = replies.read(size)
    if len(output) < size:
        raise ValueError("the channel ended")
    if how not in ("exit", "signal"):
        return CaseResult(str(how), None, None)
    status = "finished" if how == "exit" else "signal"
    if function is None:
        return CaseResult(status, code, output.decode("utf-8", "replace"))
    if status == "finished" and code == 0:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return CaseResult(status, 0, _values.loads(output))
        return CaseResult(status, 1, None)  # the program ended before the function returned
    return CaseResult(status, code, None)
