"""Answers that would be paid for what they do not do: each earns nothing, and the honest answer beside it does."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlprims.rewards import sandbox
from rlprims.rewards.sandbox import Limits, _guest, run, run_tests
from rlprims.rewards.verifiers import code_asserts

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sandbox.isolation() != "namespaces", reason="no user namespaces here"
)
SHORT = Limits(seconds=3, memory_mb=128, processes=4)
TWICE = "def twice(x): return 2 * x"
SWALLOWS = {
    "all of a map": "assert all(map(lambda x: twice(x) == 2 * x, [1, 2, 3]))",
    "a zip": "for want, got in zip([2, 4], map(twice, [1, 2])): assert want == got",
    "a filter": "assert not list(filter(lambda x: twice(x) != 2 * x, [1, 2]))",
    "a comprehension": "assert [x for x in map(twice, [1, 2]) if x not in (2, 4)] == []",
    "iter with a sentinel": "left = [0, 1, 2]\nfor got in iter(lambda: twice(left.pop()), 0): assert got in (2, 4)",
    "an except for the tests' own iterator": "it = map(twice, [1, 2])\nwhile True:\n    try: got = next(it)\n"
    "    except StopIteration: break\n    assert got in (2, 4)",
    "hasattr": "class Case:\n    @property\n    def got(self): return twice(1)\n"
    "if hasattr(Case(), 'got'): assert Case().got == 2",
    "the old protocol of iteration": "class Cases:\n    def __getitem__(self, i):\n"
    "        if i == 3: raise IndexError\n        assert twice(i) == 2 * i\nlist(Cases())",
    "finally": "def case():\n    try: assert twice(1) == 2\n    finally: return\ncase()",
    "a thread": "import threading\nt = threading.Thread(target=lambda: twice(1)); t.start(); t.join()",
    "a with that lets it through": "import contextlib\nclass Case:\n    @property\n    def got(self):\n"
    "        with contextlib.nullcontext(): return twice(1)\nhasattr(Case(), 'got')\n"
    "with contextlib.suppress(KeyError): pass",
    "a bare except in front of the end": "try: got = twice(1)\nexcept: raise\nassert got == 2",
}
RAISED = (
    "StopIteration", "StopAsyncIteration", "GeneratorExit", "SystemExit", "KeyboardInterrupt", "BaseException",
    "AttributeError", "IndexError", "type('Own', (StopIteration,), {})", "type('Own', (BaseException,), {})",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SWALLOWS)
def test_code_that_swallows_an_exception_does_not_hide_it(name: str) -> None:
    assert run_tests(TWICE, SWALLOWS[name]).ok
    for error in ("StopIteration", "AttributeError", "IndexError"):
        assert not run_tests(f"def twice(x): raise {error}('over')", SWALLOWS[name], limits=SHORT).ok


@pytest.mark.slow
@pytest.mark.parametrize("error", RAISED)
def test_no_exception_of_the_answer_ends_the_tests_early(error: str) -> None:
    tests = "assert all(map(lambda x: twice(x) == 2 * x, [1, 2, 3]))"
    late = f"def twice(x):\n    if x > 1: raise {error}\n    return 2 * x"
    assert not run_tests(late, tests, limits=SHORT).ok
    assert not run_tests(f"def twice(x): raise {error}", tests, limits=SHORT).ok


@pytest.mark.slow
def test_an_exception_that_the_tests_ask_for() -> None:
    tests = """
    import contextlib
    for bad in ("x", None):
        try:
            half(bad)
        except ValueError as error:
            assert "bad" in str(error)
        else:
            assert False
    with contextlib.suppress(ValueError):
        half("y")
        assert False
    assert half(4) == 2
    """
    own = "class Bad(ValueError): pass\ndef half(x):\n    if not isinstance(x, int): raise {}('bad')\n    return x // 2"
    for error, right in (("ValueError", True), ("Bad", True), ("UnicodeDecodeError", False), ("StopIteration", False)):
        assert run_tests(own.format(error), textwrap.dedent(tests), limits=SHORT).ok is right, error


def test_an_expected_exception_excuses_no_other() -> None:
    tests = "try: half('x')\nexcept ValueError: pass\nclass C:\n    @property\n    def got(self): return half(4)\n"
    tests += "hasattr(C(), 'got')"
    assert run_tests("def half(x):\n    if x == 'x': raise ValueError\n    return x // 2", tests).ok
    assert not run_tests("def half(x):\n    if x == 'x': raise ValueError\n    raise AttributeError", tests).ok


@pytest.mark.slow
def test_the_entry_point_exists_and_is_called() -> None:
    """A test of a function that Python has too was passed by an answer that defines nothing."""
    answer = {"test": "assert sum([1, 2]) == 3", "entry_point": "sum"}
    assert code_asserts("def sum(x): return x[0] + x[1]", answer)["score"] == 1
    assert code_asserts("def sum(x): return x[0]", answer)["score"] == 0
    assert code_asserts("def total(x): return x[0] + x[1]", answer)["score"] == 0
    assert code_asserts("", answer)["score"] == 0
    # Nor does a missing function raise the KeyError or NameError that a test may wait for.
    waits = {"test": "try: look({}, 1)\nexcept (KeyError, NameError): pass\nelse: assert False", "entry_point": "look"}
    assert code_asserts("def look(d, k): return d[k]", waits)["score"] == 1
    assert code_asserts("x = 1", waits)["score"] == 0


@pytest.mark.slow
def test_tests_that_call_nothing_give_no_score() -> None:
    for tests in ("if False: f(1)", "def case(): assert f(1) == 1", "callable(f)"):
        assert not run_tests("def f(x): return x", tests).ok
        assert "never called" in run_tests("def f(x): return x", tests).stderr
    assert not run_tests("def f(x): return x\ndef g(x): return x", "assert f(1) == 1", functions=["f", "g"]).ok


ESCAPES = {
    "shared memory of System V": """
        ids = [libc.shmget(0, 50 << 20, 0o1600) for _ in range(20)]
        print(sum(i >= 0 for i in ids), ctypes.get_errno())
        """,
    "message queues": "print(int(libc.msgget(0, 0o1600) >= 0), ctypes.get_errno())",
    "semaphores": "print(int(libc.semget(0, 30_000, 0o1600) >= 0), ctypes.get_errno())",
    "memfds": """
        made = 0
        for i in range(20):
            try:
                fd = os.memfd_create("x")
                os.truncate(fd, 50 << 20)
                made += 1
            except OSError as error:
                number = error.errno
        print(made, number)
        """,
}


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("isolated", [True, False])
def test_memory_that_no_limit_counts_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, isolated: bool) -> None:
    if not isolated:
        monkeypatch.setattr(_guest, "isolation", lambda: "none: asked for")
    start = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    result = run(start + textwrap.dedent(ESCAPES[name]), limits=SHORT, allow_unisolated=not isolated)
    assert result.stdout == "0 1\n", result.stderr  # EPERM


def test_the_input_cannot_grow() -> None:
    """It is a memfd, which no limit of memory counts."""
    result = run("import os\ntry: os.ftruncate(0, 1 << 25)\nexcept OSError: print(len(input()))", stdin="1234")
    assert result.stdout == "4\n"


def test_inodes_are_counted() -> None:
    text = """
        import os
        made = 0
        try:
            while True:
                os.mkdir(str(made))
                made += 1
        except OSError as error:
            print(made, error.strerror)
    """
    result = run(textwrap.dedent(text), limits=Limits(seconds=10, files=100))
    assert result.stdout.split(" ", 1) == ["100", "No space left on device\n"]


def sandboxed(trainer: int) -> list[int]:
    """Processes of a sandbox that a trainer started, by their command lines."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if f"trainer={trainer}" in (entry / "cmdline").read_text():
                found.append(int(entry.name))
    return found


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("ancestor", range(4))
def test_unisolated_processes_end_whichever_ancestor_is_killed(ancestor: int) -> None:
    """The program's parent, the process that watches it, the trainer, and a trainer in a session of its own."""
    script = """
    from rlprims.rewards import sandbox
    from rlprims.rewards.sandbox import _guest
    _guest.isolation = lambda: "none: asked for"
    program = "import os, time\\nif os.fork() == 0:\\n    os.setsid()\\n    if os.fork() == 0: time.sleep(1000)\\n"
    program += "    time.sleep(1000)\\ntime.sleep(1000)"
    sandbox.run(program, limits=sandbox.Limits(seconds=1000), allow_unisolated=True)
    """
    root = Path(__file__).parents[2]
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=root, start_new_session=ancestor == 3
    )
    try:
        wait_until(lambda: len(sandboxed(trainer.pid)) == 3)
        program = min(sandboxed(trainer.pid))
        first = parent(program)
        os.kill([first, parent(first), trainer.pid, trainer.pid][ancestor], signal.SIGKILL)
        wait_until(lambda: not sandboxed(trainer.pid))
        # Whoever is left removes the folder, and needs a moment for it.
        wait_until(lambda: not list(Path(tempfile.gettempdir()).glob(f"rlprims-sandbox-{trainer.pid}-*")))
    finally:
        trainer.kill()
        trainer.wait()
