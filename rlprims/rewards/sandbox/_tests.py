"""Runs inside a second sandbox: the tests, which call the program's functions over descriptor 3. Exit code 0: passed.

Builtins catch some exceptions: ``all(map(f, inputs))`` ends at a StopIteration as at the end of the inputs. Therefore
an exception of the program fails the tests, unless an ``except`` clause or a ``with`` of the tests catches it.
"""

import ast
import builtins
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

_LONGEST_ANSWER = 50_000_000
_NEVER_CALLED, _UNTESTABLE = 3, 97
_CONTROL_FLOW = (StopIteration, StopAsyncIteration)
_NOTE = "_expected_here"


class _Mark(ast.NodeTransformer):
    """Adds code to the tests that notes each exception that an ``except`` clause catches or a ``with`` suppresses."""

    def __init__(self) -> None:
        self._withs = 0

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, ast.parse(f"{_NOTE}.caught()").body[0])
        return node

    def visit_With(self, node: ast.With) -> list[ast.stmt]:
        """``with a: b`` becomes ``with a: with note.leaves(1): b``, and after it ``note.kept(1)``."""
        self.generic_visit(node)
        self._withs += 1
        inner, after = ast.parse(f"with {_NOTE}.leaves({self._withs}): pass\n{_NOTE}.kept({self._withs})").body
        assert isinstance(inner, ast.With)
        inner.body, node.body = node.body, [inner]
        return [node, after]


class _Expected:
    """Notes of the exceptions. ``open`` has those of the program that no test has caught yet."""

    def __init__(self) -> None:
        self.open: list[BaseException] = []
        self._left: dict[int, BaseException | None] = {}

    def caught(self) -> None:
        self.expect(sys.exception())

    @contextlib.contextmanager
    def leaves(self, number: int) -> Iterator[None]:
        self._left[number] = None
        try:
            yield
        except BaseException as error:
            self._left[number] = error
            raise

    def kept(self, number: int) -> None:
        self.expect(self._left.pop(number, None))

    def expect(self, error: BaseException | None) -> None:
        while error is not None:
            self.open = [other for other in self.open if other is not error]
            error = error.__cause__ or error.__context__


def main() -> None:
    here = Path(__file__).parent
    sys.path.insert(0, str(here))
    values = importlib.import_module("_values")
    importlib.import_module("_start").begin()
    sys.setrecursionlimit(10_000)
    answers = os.fdopen(os.dup(3), "rb")
    expected, called = _Expected(), set[str]()

    def remote(name: str) -> Callable[..., Any]:
        """A function that calls the program's function of this name, with plain data as arguments and result."""

        def function(*arguments: Any, **named: Any) -> Any:
            try:
                call = values.dumps((name, arguments, named)).encode() + b"\n"
            except TypeError as problem:
                end(_UNTESTABLE, f"{name} cannot be called by these tests: {problem}")
            called.add(name)
            while call:
                try:
                    call = call[os.write(3, call) :]
                except OSError:
                    end(1, f"the program ended before a call of {name}")
            line = answers.readline(_LONGEST_ANSWER)
            if not line.endswith(b"\n"):
                end(1, f"the program ended, or its answer was too long, in a call of {name}")
            try:
                kind, *answer = values.loads(line)
                if kind == "value":
                    (value,) = answer
                    return value
                kinds, text = answer
                error = exception(kinds, str(text))
            except Exception as problem:
                end(1, f"the answer of {name} cannot be read: {problem!r}"[:1000])
            expected.open.append(error)
            raise error

        return function

    names = (here / "names.txt").read_text(encoding="utf-8").split()
    namespace: dict[str, Any] = {"__name__": "tests"}
    with contextlib.suppress(SyntaxError):  # a prompt may be code that is complete only with the response
        exec(compile((here / "setup.py").read_text(encoding="utf-8"), "setup.py", "exec"), namespace)
    tree = ast.parse((here / "tests.py").read_text(encoding="utf-8"))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for name in [*(used - set(namespace) - set(dir(builtins))), *names]:
        namespace[name.replace("().", "_")] = remote(name)  # definitions of the tests replace it
    namespace[_NOTE] = expected
    cases = TestCases(expected)
    try:
        exec(compile(ast.fix_missing_locations(_Mark().visit(tree)), "tests.py", "exec"), namespace)
        cases.run(namespace)
    except SystemExit as error:
        end(1, f"the tests ended themselves: {error!r}")
    if expected.open:
        end(1, f"the program raised {expected.open[0]!r}, which no test expects"[:1000])
    if never := sorted(set(names) - called) if names or called else ["a function of the program"]:
        end(_NEVER_CALLED, f"the tests never called {', '.join(never)}")
    os._exit(0)


class TestCases:
    """The classes of ``unittest`` in the tests. They run after the tests' text, in the place of ``unittest.main()``."""

    def __init__(self, expected: _Expected) -> None:
        unittest: Any = importlib.import_module("unittest")
        unittest.main = unittest.TestProgram = lambda *_, **__: None
        context = unittest.case._AssertRaisesContext
        leave = context.__exit__

        def leave_and_note(self: Any, kind: Any, error: Any, trace: Any) -> bool:
            is_expected = bool(leave(self, kind, error, trace))
            if is_expected:
                expected.expect(error)
            return is_expected

        context.__exit__ = leave_and_note
        self._unittest: Any = unittest

    def run(self, namespace: dict[str, Any]) -> None:
        for kind in list(namespace.values()):
            if isinstance(kind, type) and issubclass(kind, self._unittest.TestCase) and kind.__module__ == "tests":
                result = self._unittest.TestResult()
                self._unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
                if not result.wasSuccessful():
                    end(1, f"{kind.__name__}: {(result.failures + result.errors)[0][1]}"[:1000])


def exception(kinds: Sequence[str], text: str) -> Exception:
    """The first of the classes that is a builtin exception; RuntimeError for StopIteration and the like (PEP 479)."""
    for name in kinds:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            if issubclass(kind, _CONTROL_FLOW):
                break
            try:
                return kind(text)
            except TypeError:  # UnicodeDecodeError and ExceptionGroup need more arguments
                break
    return RuntimeError(f"{kinds[0]}: {text}")


def end(code: int, reason: str) -> NoReturn:
    """Exit at once, so that the tests cannot catch an exception."""
    os.write(2, reason.encode("utf-8", "replace") + b"\n")
    os._exit(code)


if __name__ == "__main__":
    main()
