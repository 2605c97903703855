"""Model-written Python, run behind walls: :func:`run` for a program, :func:`run_tests` for functions with asserts.

The walls are Linux namespaces (no network, no files but the system's libraries and Python, read-only, an own process
tree that ends as a whole), resource limits, and an environment without anything of the parent's. Where the kernel does
not give them nothing is run, unless ``allow_unisolated=True`` says that limits alone will do. It is no virtual
machine: a hole in the kernel is a hole in the walls.
"""

import socket
import time
from collections.abc import Sequence
from pathlib import Path

from rlprims.rewards.sandbox._guest import Guest, IsolationError, Limits, Result, choose, isolation, wait_for

__all__ = ["IsolationError", "Limits", "Result", "isolation", "run", "run_tests"]

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
