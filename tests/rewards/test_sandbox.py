"""What a program must not do, tried."""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rlprims.rewards import sandbox
from rlprims.rewards.sandbox import IsolationError, Limits, Result, _guest, _values, run, run_tests
from rlprims.rewards.verifiers import code_asserts, code_stdin

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
isolated = pytest.mark.skipif(
    sys.platform != "linux" or sandbox.isolation() != "namespaces", reason="no user namespaces here"
)
SHORT = Limits(seconds=2, memory_mb=256)


def program(text: str, **more: object) -> Result:
    return run(textwrap.dedent(text), **{"limits": SHORT, **more})  # type: ignore[arg-type]


def processes(trainer: int | None = None) -> list[str]:
    """Sandboxed programs of this process, or another, that run anywhere on the machine."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            found.append((entry / "cmdline").read_text())
    return [line for line in found if f"trainer={trainer or os.getpid()}" in line]


@isolated
def test_a_program_and_its_input() -> None:
    result = run("print(int(input()) ** 2)", stdin="12\n")
    assert result == Result("finished", 0, "144\n", "", "namespaces")
    assert result.ok


@isolated
def test_how_it_ends_is_known() -> None:
    assert program("raise SystemExit(3)")[:2] == ("finished", 3)
    assert program("import os; os.kill(os.getpid(), 9)")[:2] == ("signal", 9)
    assert program("import ctypes; ctypes.string_at(0)")[:2] == ("signal", 11)
    failed = program("1 / 0")
    assert not failed.ok
    assert "ZeroDivisionError" in failed.stderr


@isolated
def test_the_environment_holds_nothing_of_the_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "canary")
    result = program("import os; print(sorted(os.environ)); print(os.environb)")
    assert "canary" not in result.stdout
    assert result.stdout.startswith("['HOME', 'LANG', 'PATH', 'TMPDIR']")


@isolated
def test_files_of_the_parent_are_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("canary")
    secret.chmod(0o644)
    paths = [str(secret), "/etc/passwd", "/etc/shadow", str(Path.home() / ".ssh"), os.getcwd(), "/proc/1/environ"]
    result = program(f"import os; print([p for p in {paths!r} if os.path.exists(p)])")
    assert result.stdout == "[]\n"


@isolated
def test_no_way_out_by_symlink_or_by_parent_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("canary")
    result = program(f"""
        import os
        os.symlink({str(tmp_path)!r}, "link")
        os.symlink("/", "root")
        for path in ("link/secret", "root{tmp_path}/secret", "../../../../..{tmp_path}/secret"):
            try:
                print(open(path).read())
            except OSError as error:
                print(type(error).__name__)
    """)
    assert result.stdout == "FileNotFoundError\n" * 3


@isolated
def test_a_sandboxed_program_writes_only_in_its_own_folder(tmp_path: Path) -> None:
    outside = tmp_path / "new"
    result = program(f"""
        open("mine", "w").write("ok")
        print(open("mine").read())
        for path in ("/usr/x", "/box/x", "/box/main.py", "/x", "/dev/x", {str(outside)!r}):
            try:
                open(path, "w")
                print("wrote", path)
            except OSError:
                pass
    """)
    assert result.stdout == "ok\n"
    assert not outside.exists()


@isolated
def test_the_sandboxs_folder_is_empty_again_and_bounded() -> None:
    program("open('mine', 'w').write('left')")
    assert program("import os; print(os.listdir())").stdout == "[]\n"
    result = program(
        """
        try:
            for i in range(100):
                open(str(i), "wb").write(bytes(10**6))
        except OSError as error:
            print(error.strerror)
        """,
        limits=Limits(seconds=10, disk_mb=8),
    )
    assert "No space left" in result.stdout


@isolated
def test_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0rlprims-test-sandbox")
        abstract.listen()
        result = program(f"""
            import socket
            for family, address in ((socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})),
                                    (socket.AF_INET, ("8.8.8.8", 53)), (socket.AF_UNIX, "\\0rlprims-test-sandbox")):
                try:
                    socket.socket(family).connect(address)
                    print("connected")
                except OSError as error:
                    print("no")
        """)
    assert result.stdout == "no\n" * 3


@pytest.mark.slow
@isolated
def test_endless_time_output_and_memory() -> None:
    began = time.monotonic()
    assert program("while True: pass").status == "timeout"
    assert program("import time; time.sleep(1000)").status == "timeout"
    assert program("import sys\nwhile True: sys.stdout.write('x' * 4096)").status == "output limit"
    assert program("import sys\nwhile True: sys.stderr.write('x' * 4096)").status == "output limit"
    assert len(program("import sys\nwhile True: sys.stdout.write('x' * 4096)").stdout) == SHORT.output_bytes
    assert "MemoryError" in program("x = []\nwhile True: x.append(bytes(10**6))").stderr
    assert time.monotonic() - began < 2 * SHORT.seconds + 30


@pytest.mark.slow
@isolated
def test_a_fork_bomb_is_bounded_and_nothing_of_it_is_left() -> None:
    result = program("""
        import os, time
        while True:
            try:
                os.fork()
            except OSError:
                time.sleep(0.01)
    """)
    assert result.status in ("timeout", "output limit")
    assert not processes()


@isolated
def test_daemons_end_with_the_program() -> None:
    result = program("""
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(0)
        print("parent")
    """)
    assert result.stdout == "parent\n"
    assert not processes()


@pytest.mark.slow
@isolated
def test_handled_signals_do_not_help() -> None:
    result = program("""
        import signal
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True: pass
    """)
    assert result.status == "timeout"
    assert not processes()


@isolated
def test_a_sandboxed_program_cannot_reach_the_process_that_watches_it() -> None:
    result = program("""
        import os
        for process in (1, -1, os.getppid()):
            try:
                os.kill(process, 9)
            except OSError as error:
                print(type(error).__name__)
        print("alive")
        for fd in range(3, 1000):
            try:
                os.write(fd, b"exit 0\\n")
                print("wrote", fd)
            except OSError:
                pass
        raise SystemExit(5)
    """)
    assert "wrote" not in result.stdout
    assert not result.ok


@isolated
def test_a_sandboxed_program_has_no_capabilities() -> None:
    result = program("""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print(os.getuid(), libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.chroot(b"/"))
        print(libc.unshare(0x10000000))  # a user namespace of its own
    """)
    assert result.stdout == "65534 -1 -1\n-1\n"


def test_without_isolation_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_guest, "isolation", lambda: "none: unshare: Operation not permitted")
    for refused in (lambda: run("1"), lambda: run_tests("", "1"), lambda: code_asserts("", "assert f()")):
        with pytest.raises(IsolationError, match="this machine is none: unshare: Operation not permitted"):
            refused()


@isolated
def test_walls_that_let_no_python_in_are_no_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_guest, "_readable", lambda: ["/dev/null"])
    assert _guest.isolation.__wrapped__().startswith("none: Python does not start inside")


@isolated
def test_walls_that_fail_half_way_run_nothing() -> None:
    with pytest.raises(IsolationError, match="mount /tmp: Invalid argument"):
        run("print('ran')", limits=Limits(disk_mb=-1))


@pytest.mark.slow
def test_unisolated_only_if_allowed_and_the_result_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_guest, "isolation", lambda: "none: no namespaces")
    monkeypatch.setenv("API_KEY", "canary")
    result = run("import os; print(input(), os.environ.get('API_KEY'))", stdin="hi", allow_unisolated=True)
    assert result == Result("finished", 0, "hi None\n", "", "none")
    assert run("while True: pass", limits=SHORT, allow_unisolated=True).status == "timeout"
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\n"
    assert run(daemon, limits=SHORT, allow_unisolated=True).ok
    assert not processes()
    assert code_asserts("def f(x): return x + 1", "assert f(1) == 2", allow_unisolated=True)["score"] == 1
    assert code_asserts("def f(x): return x", "assert f(1) == 2", allow_unisolated=True)["score"] == 0


@pytest.mark.slow
@isolated
def test_no_program_outlives_a_killed_trainer(tmp_path: Path) -> None:
    script = "from rlprims.rewards import sandbox\nsandbox.isolation()\nprint(1, flush=True)\n"
    script += "sandbox.run('import time; time.sleep(1000)', limits=sandbox.Limits(seconds=1000))"
    root = Path(__file__).parents[2]
    trainer = subprocess.Popen([sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    trainer.stdout.readline()
    limit = time.monotonic() + 30
    while not processes(trainer.pid):
        assert time.monotonic() < limit
        time.sleep(0.05)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    while processes(trainer.pid):
        assert time.monotonic() < limit
        time.sleep(0.05)


SQUARE = "assert square(3) == 9\nassert square(-2) == 4"


@isolated
def test_asserts() -> None:
    assert run_tests("def square(x): return x * x", SQUARE).ok
    wrong = run_tests("def square(x): return x + 7", SQUARE)
    assert not wrong.ok
    assert "AssertionError" in wrong.stderr


CHEATS = {
    "ends before the tests": "import os\nos._exit(0)",
    "exits before the tests": "raise SystemExit(0)",
    "prints that it passed": "print('passed')\nprint('exit 0')\nprint('OK')\nimport os; os._exit(0)",
    "ends in a call": "def square(x):\n    import os\n    print('passed')\n    os._exit(0)",
    "equals everything": "class E:\n    def __eq__(self, o): return True\ndef square(x): return E()",
    "a number that equals everything": "class E(int):\n    def __eq__(self, o): return True\n"
    "    def __index__(self): return 9\ndef square(x): return E(9)",
    "patches assert": "import builtins\nbuiltins.AssertionError = Warning\ndef square(x): return 0",
    "patches the interpreter": "import sys\nfor m in list(sys.modules.values()):\n"
    "    if hasattr(m, 'loads'): m.dumps = lambda *a: '[\"value\", true]'\ndef square(x): return 0",
    "raises": "def square(x): raise Exception('passed')",
    "raises SystemExit": "def square(x): raise SystemExit(0)",
    "writes to every descriptor": "import os\ndef square(x):\n    for fd in range(64):\n"
    "        try: os.write(fd, b'exit 0\\n')\n        except OSError: pass\n    return 0",
    "answers first": 'import os\nos.write(3, b\'["value", {"int": "9"}]\\n\' * 9)\ndef square(x): return 0',
    "answers nonsense": "import os\nos.write(3, b'\\xff\\xfe{[' * 99 + b'\\n')\ndef square(x): return 0",
    "answers without end": "import os\nwhile True: os.write(3, b'9' * 4096)",
    "answers too deep": "import os\nos.write(3, b'[' * 10**5 + b'\\n')",
    "looks for the tests": "import glob\nfor p in glob.glob('/box/*'):\n    if 'tests' in p: raise SystemExit(0)\n"
    "def square(x): return 0",
    "traces its caller": "import sys\ndef square(x):\n    f = sys._getframe()\n    while f:\n"
    "        f.f_globals['__name__'] = 'x'\n        f = f.f_back\n    return 0",
    "hangs": "def square(x):\n    while True: pass",
    "no function": "cube = 1",
    "no Python": "this is no Python (",
    "nul and surrogates": "\0\ud800",
    "nothing": "",
}


@isolated
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_does_not_pass(name: str) -> None:
    assert not run_tests(CHEATS[name], SQUARE, limits=SHORT).ok
    assert not processes()


@isolated
def test_plain_data_crosses_exactly() -> None:
    tests = """
    import math
    values = [None, True, False, 0, -1, 2**70, 1.5, float("inf"), 1e-320, "", "\\ud800\\n\\0", b"\\0\\xff", 1 + 2j,
              [], [1, [2]], (), (1,), {1, 2}, frozenset({1}), {}, {"a": 1, 2: (3,), (4, 5): [6]}, {"int": "ff"}]
    for value in values:
        got = echo(value)
        assert got == value and type(got) is type(value), value
    assert math.isnan(echo(math.nan))
    assert math.copysign(1, echo(-0.0)) == -1
    assert echo(value=3) == 3
    try:
        fails()
    except ValueError as error:
        assert str(error) == "why"
    else:
        assert False
    """
    functions = "def echo(value): return value\ndef fails(): raise ValueError('why')"
    result = run_tests(functions, textwrap.dedent(tests))
    assert result.ok, result.stderr


def test_the_sandbox_passes_plain_values_only() -> None:
    for value in (object(), range(3), iter([]), lambda: 0, [object()]):
        with pytest.raises(TypeError, match="only plain data"):
            _values.dumps(value)


@isolated
def test_subclasses_cross_as_what_they_are() -> None:
    functions = "from collections import Counter\ndef count(x): return Counter(x)"
    assert run_tests(functions, "assert count('aab') == {'a': 2, 'b': 1}; assert type(count('a')) is dict").ok


ADD = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}


@pytest.mark.slow
@isolated
@pytest.mark.parametrize(
    ("response", "passed"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", 1.0),
        ("Here:\n```python\na, b = map(int, input().split())\nprint(a + b, end=' \\n\\n')\n```\nDone.", 1.0),
        ("print(3)", 0.5),
        ("print(3); print(7)", 0.0),
        ("print('passed')", 0.0),
        ("print(3)\nraise SystemExit(1)", 0.0),
        ("```python\nwhile True: pass\n```", 0.0),
        ("", 0.0),
    ],
)
def test_stdin_and_stdout(response: str, passed: float) -> None:
    partial = code_stdin(response, ADD, seconds=2, partial=True)
    assert partial == {"score": passed, "acc": float(passed == 1), "passed": passed}
    assert code_stdin(response, ADD, seconds=2)["score"] == float(passed == 1)


def test_answers_that_are_no_tests() -> None:
    for answer in ({}, {"inputs": [], "outputs": []}, {"inputs": ["1"], "outputs": []}, "{}"):
        with pytest.raises(ValueError, match="expected inputs and outputs in the answer"):
            code_stdin("print(1)", answer)
    with pytest.raises(ValueError, match="expected tests in the answer"):
        code_asserts("x = 1", {"entry_point": "f"})


@isolated
def test_completions_and_blocks() -> None:
    prompt = 'def offset(): return 10\n\ndef f(x):\n    """Adds."""\n'
    test = "def check(candidate):\n    assert candidate(1) == 1 + offset()\n"
    answer = {"prompt": prompt, "test": test, "entry_point": "f"}
    assert code_asserts("    return x + offset()\n", answer)["score"] == 1
    assert code_asserts("    return x\n", answer)["score"] == 0
    assert code_asserts("So:\n```python\ndef f(x):\n    return x + 10\n```", answer)["score"] == 1
    assert code_asserts("```python\n    return x + offset()\n```", answer)["score"] == 1
    assert code_asserts("", answer)["score"] == 0
