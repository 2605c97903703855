"""Model-written Python, run in isolation: a program by :func:`run`, on many inputs by :func:`run_cases`, tests of its
functions by :func:`run_tests`.

The isolation is by Linux namespaces (no network; no files except the system's libraries and Python, read-only; its own
process tree, which is killed as a whole), resource limits, and an empty environment. If the kernel does not provide
namespaces, nothing is run, unless ``allow_unisolated=True`` accepts the limits alone. It is not a virtual machine: a
fault of the kernel is a fault of the isolation.
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


def run(program: str, *, stdin: str = "", limits: Limits | None = None, allow_unisolated: bool = False) -> Result:
    """Run a Python program; whatever it does, this returns within the limits and nothing of it is left.

    The program has the standard library, an empty writable directory, and no more. ``isolation`` of the result says
    what it ran behind.

    Raises:
        IsolationError: there is no isolation here, and ``allow_unisolated`` is not set.

    >>> run("print(int(input()) ** 2)", stdin="12").stdout  # doctest: +SKIP
    '144\\n'
    """
    isolate = choose(allow_unisolated)
    with Guest({"main.py": program}, limits or Limits(), isolate=isolate, stdin=stdin) as guest:
        return guest.wait()


def run_tests(
    program: str,
    tests: str,
    *,
    before: str = "",
    setup: str = "",
    functions: Sequence[str] = (),
    limits: Limits | None = None,
    allow_unisolated: bool = False,
) -> Result:
    """Run tests against a program's functions; ``ok`` of the result if all of them ran to the end.

    Program and tests are in two sandboxes. The tests are trusted code that only ever sees plain data from the program,
    so that it cannot forge their verdict. Names that the tests use and do not define are the program's functions;
    ``functions`` names those that ``setup``, code for the tests alone, defines too.

    Raises:
        IsolationError: as for :func:`run`.
    """
    isolate, limits = choose(allow_unisolated), limits or Limits()
    ours, theirs = socket.socketpair()
    values = {"_values.py": (_HERE / "_values.py").read_text()}
    tested = {"main.py": (_HERE / "_functions.py").read_text(), "before.py": before, "program.py": program}
    testing = {
        "main.py": (_HERE / "_tests.py").read_text(),
        "setup.py": setup,
        "tests.py": tests,
        "names.txt": "\n".join(functions),
    }
    with (
        ours,
        theirs,
        Guest(values | tested, limits, isolate=isolate, channel=theirs) as answering,
        Guest(values | testing, limits, isolate=isolate, channel=ours) as asking,
    ):
        ours.close()
        theirs.close()
        over = False
        while True:
            waiting = (asking,) if over else (asking, answering)
            ready = wait_for(*waiting)
            if not over:
                over = answering.step(ready)
                if over:
                    answering.result()  # it ends now: the tests then see the end of the channel
                if not answering.ready:
                    asking.deadline = time.monotonic() + limits.seconds  # the tests' time begins when both are there
            if asking.step(ready):
                result = asking.result()
                if result.status == "finished" and result.code == _UNTESTABLE:
                    raise ValueError(result.stderr.strip())
                return result


class CaseResult(NamedTuple):
    """How a program ended on one case."""

    status: str
    """``finished``, ``signal``, ``timeout`` or ``output limit``"""
    code: int | None
    """exit code, or number of the signal"""
    output: Any
    """the text that it printed, or the value that the function returned"""

    @property
    def ok(self) -> bool:
        return self.status == "finished" and self.code == 0


def run_cases(
    program: str,
    cases: Sequence[Any],
    *,
    function: str | None = None,
    before: str = "",
    limits: Limits | None = None,
    total_seconds: float = 60.0,
    allow_unisolated: bool = False,
) -> Generator[CaseResult, None, None]:
    """Run a program on each case, in one sandbox: a result for each, in their order; take no more, and it ends.

    A case is the text of its stdin; or, with the name of a ``function`` of the program (or of its class ``Solution``),
    the arguments, plain data. The program is compiled once, and each case has a process that is forked for it: a case
    that hangs or crashes costs itself. Files in its folder stay from case to case.

    Args:
        program: the code.
        cases: texts, or sequences of arguments.
        function: what is called.
        before: code to put before the program: imports, helpers.
        limits: of each case; ``disk_mb``, ``files`` and ``processes`` of all together.
        total_seconds: wall time of all; cases that are left then are ``timeout``.
        allow_unisolated: see :func:`run`.

    Raises:
        IsolationError: as for :func:`run`.

    >>> [case.output for case in run_cases("print(2 * int(input()))", ["3", "4"])]  # doctest: +SKIP
    ['6\\n', '8\\n']
    """
    return _run_cases(
        program, cases, function, before, limits or Limits(), total_seconds, isolate=choose(allow_unisolated)
    )


def _run_cases(
    program: str,
    cases: Sequence[Any],
    function: str | None,
    before: str,
    limits: Limits,
    total_seconds: float,
    *,
    isolate: bool,
) -> Generator[CaseResult, None, None]:
    ours, theirs = socket.socketpair()
    files = {
        "main.py": (_HERE / "_cases.py").read_text(),
        "_values.py": (_HERE / "_values.py").read_text(),
        "before.py": before,
        "program.py": program,
    }
    of_all = replace(limits, seconds=total_seconds)
    with ours, theirs, Guest(files, of_all, isolate=isolate, channel=theirs) as guest:
        theirs.close()
        while not guest.ready:
            if guest.step(wait_for(guest)):
                guest.result()  # raises where the sandbox did not start
                break
        replies = ours.makefile("rb")
        gone: CaseResult | None = None
        for case in cases:
            left = guest.deadline - time.monotonic()
            if gone is None and left <= 0:
                gone = CaseResult("timeout", None, None)
            if gone is None:
                request: dict[str, Any] = {"seconds": min(limits.seconds, left), "output_bytes": limits.output_bytes}
                request |= (
                    {"stdin": case}
                    if function is None
                    else {"function": function, "arguments": _values.pack(list(case))}
                )
                ours.settimeout(left)
                try:
                    ours.sendall(json.dumps(request).encode() + b"\n")
                    result = _reply(replies, limits, function)
                except TimeoutError:
                    gone = CaseResult("timeout", None, None)
                except (OSError, ValueError, TypeError, RecursionError):  # it has ended what runs the cases
                    gone = CaseResult("signal", None, None)
            yield gone if gone is not None else result


def _reply(replies: Any, limits: Limits, function: str | None) -> CaseResult:
    how, code, size = json.loads(replies.readline(1000))
    if not isinstance(size, int) or not 0 <= size <= limits.output_bytes:
        raise ValueError(f"{size} bytes")
    output = replies.read(size)
    if len(output) < size:
        raise ValueError("the end")
    if how not in ("exit", "signal"):
        return CaseResult(str(how), None, None)
    status = "finished" if how == "exit" else "signal"
    if function is None:
        return CaseResult(status, code, output.decode("utf-8", "replace"))
    if status == "finished" and code == 0:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return CaseResult(status, 0, _values.loads(output))
        return CaseResult(status, 1, None)  # it ended before the function returned
    return CaseResult(status, code, None)
