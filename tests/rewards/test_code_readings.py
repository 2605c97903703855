"""Honest programs in the forms in which models write them, tests in the forms in which data sets have them."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlprims.rewards import sandbox
from rlprims.rewards.sandbox import Limits, run, run_cases, run_tests
from rlprims.rewards.verifiers import check_answer, code_asserts, code_stdin
from rlprims.rewards.verifiers._blocks import python_code

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sandbox.isolation() != "namespaces", reason="no user namespaces here"
)
THRICE = {"inputs": ["2\n", "5\n"], "outputs": ["6\n", "15\n"]}
CODE = "n = int(input())\nprint(3 * n)"
WRONG = "n = int(input())\nprint(6)"


@pytest.mark.parametrize("end", ["exit()", "quit()", "exit(0)", "import sys\nsys.exit()", "raise SystemExit"])
def test_a_program_may_exit(end: str) -> None:
    assert code_stdin(f"{CODE}\n{end}\nprint('more')", THRICE)["score"] == 1
    assert code_stdin(f"{CODE}\nexit(1)", THRICE)["score"] == 0
    assert run(f"print(1)\n{end}").ok
    assert run("exit('why')")[:4] == ("finished", 1, "", "why\n")


@pytest.mark.parametrize(
    "code",
    [
        "def f(values: List[int], other: Optional[int] = None) -> int: return sum(values)",
        "def f(values): return reduce(lambda a, b: a + b, accumulate(values, lambda a, b: b))",
        "def f(values): return sum(chain.from_iterable(repeat(k, v) for k, v in Counter(values).items()))",
        "def f(values):\n    heapify(values)\n    return sum(heappop(values) for _ in range(len(values)))",
        "def f(values): return int(math.fsum(values)) + bisect.bisect_left(values, -inf)",
        "class Solution:\n    def f(self, values: 'List[int]') -> int: return int(mean(values) * len(values))",
    ],
)
def test_names_that_the_harnesses_import(code: str) -> None:
    answer = {"fn_name": "f", "inputs": [[[1, 2, 3]], [[5]]], "outputs": [6, 5]}
    assert code_stdin(code, answer)["score"] == 1
    assert not next(run_cases(code, [[[1, 2, 3]]], function="f")).ok


def test_a_programs_own_names_come_first() -> None:
    answer = {"inputs": ["1"], "outputs": ["4 5 3"]}
    code = "def gcd(a): return a + 3\ndeque = 5\nfrom math import floor as sqrt\n"
    code += "print(gcd(int(input())), deque, sqrt(3.5))"
    assert code_stdin(code, answer)["score"] == 1


NUMPY = "import numpy as np\ndef total(values): return np.sum(np.array(values))"
WITH_NUMPY = {"test": "import numpy as np\ndef check(f): assert np.allclose(f([0.5, 2]), 2.5)", "entry_point": "total"}


def test_numpy_by_option() -> None:
    for option, said in (({"packages": ("numpy",)}, 1), ({}, None)):
        verifier = partial(code_asserts, **option)  # type: ignore[arg-type]
        if said is None:
            with pytest.raises(ValueError, match=r"import numpy, .*set packages=\['numpy'\]"):
                verifier(NUMPY, WITH_NUMPY)
            with pytest.raises(ValueError, match="import numpy"):
                check_answer(code_asserts, WITH_NUMPY, "x")
        else:
            assert verifier(NUMPY, WITH_NUMPY)["score"] == said
            assert verifier(NUMPY.replace("sum", "max"), WITH_NUMPY)["score"] == 0
            check_answer(code_asserts, WITH_NUMPY, "x", option)
    cases = {"fn_name": "total", "inputs": [[[1, 2]], [[4]]], "outputs": [3, 4]}
    assert code_stdin(NUMPY, cases, packages=["numpy"])["score"] == 1
    assert code_stdin(NUMPY, cases)["score"] == 0
    assert code_stdin(
        "import numpy\nprint(numpy.arange(3).sum())", {"inputs": [""], "outputs": ["3"]}, packages=["numpy"]
    )["score"]
    with pytest.raises(ValueError, match="packages has 'no_such'"):
        run("", packages=["no_such"])


def test_a_package_is_read_only_and_alone() -> None:
    program = """
import numpy, os, socket
folder = os.path.dirname(numpy.__file__)
file = numpy.__file__
tried = [lambda: open(folder + "/x", "w"), lambda: open(file, "a"), lambda: os.remove(file),
         lambda: os.chmod(file, 511), lambda: os.mkdir(folder + ".more"), lambda: os.rename(folder, "/tmp/n"),
         lambda: os.symlink("/tmp", folder + "/link"), lambda: socket.socket().connect(("127.0.0.1", 9))]
for attempt in tried:
    try:
        attempt()
        print("did it")
    except OSError:
        pass
print(sorted(os.listdir(os.path.dirname(folder))))
try:
    import pydantic
except ImportError:
    print("alone")
"""
    result = run(program, packages=["numpy"], limits=Limits(seconds=20))
    assert result.stdout == "['numpy', 'numpy.libs']\nalone\n" or result.stdout == "['numpy']\nalone\n", result


def test_a_package_that_everyone_may_write_is_read_only_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "open_to_all"
    folder.mkdir()
    (folder / "__init__.py").write_text("value = 7")
    folder.chmod(0o777)
    (folder / "__init__.py").chmod(0o666)
    monkeypatch.syspath_prepend(tmp_path)
    program = "import open_to_all\nprint(open_to_all.value)\nopen(open_to_all.__file__, 'a')"
    result = run(program, packages=["open_to_all"])
    assert result.stdout == "7\n"
    assert "Read-only file system" in result.stderr


METHOD = {
    "prompt": "from typing import List\nclass Solution:\n    def best(self, values: List[int]) -> int:\n        ",
    "entry_point": "Solution().best",
    "test": "def check(candidate):\n    assert candidate(values=[1, 7]) == 7\n    assert candidate([3, 2]) == 3",
}


def test_a_method_as_entry_point() -> None:
    code = "```python\nclass Solution:\n    def best(self, values: List[int]) -> int:\n        return {}(values)\n```"
    assert code_asserts(code.format("max"), METHOD, seconds=30)["score"] == 1
    assert code_asserts("return max(values)", METHOD, seconds=30)["score"] == 1  # a completion of the prompt
    for wrong in (code.format("min"), code.replace("best", "other").format("max"), "", "class Solution: best = 7"):
        assert code_asserts(wrong, METHOD)["score"] == 0


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (
            {"code": "class Stack:\n    pass", "test_list": ["s = Stack()", "s.push(1)", "assert s.pop() == 1"]},
            "class Stack",
        ),
        (
            {"prompt": "class Stack:\n    pass\n", "test": "assert Stack().size() == 0", "entry_point": "Stack"},
            "class Stack",
        ),
        ({"entry_point": "Stack().a.b", "test": "def check(f): assert f() == 1"}, "entry_point"),
        ({"test_list": ["import pandas", "assert f() == 1"]}, "import pandas"),
    ],
)
def test_tests_that_cannot_run_raise_when_the_data_is_read(answer: Any, why: str) -> None:
    for given in (answer, json.dumps(answer)):
        with pytest.raises(ValueError, match=why):
            check_answer(code_asserts, given, "x")
        with pytest.raises(ValueError, match=why):
            code_asserts("def f(): return 1", given)


UNITTEST = """
import unittest

class Cases(unittest.TestCase):
    def test_value(self):
        self.assertEqual(half(4), 2)
        self.assertRaises(ValueError, half, "x")
        with self.assertRaises(ValueError):
            half(None)

if __name__ == "__main__":
    unittest.main()
"""
HALF = "def half(x):\n    if not isinstance(x, int): raise ValueError('no')\n    return x // 2"


@pytest.mark.parametrize("tests", [UNITTEST, UNITTEST.replace('if __name__ == "__main__":\n    ', "")])
def test_unittest(tests: str) -> None:
    assert code_asserts(HALF, {"test": tests, "entry_point": "half"})["score"] == 1
    for wrong in (
        HALF.replace("// 2", "// 4"),
        HALF.replace("ValueError", "KeyError"),
        "def half(x): return 2",
        "half = 1",
    ):
        assert code_asserts(wrong, {"test": tests, "entry_point": "half"})["score"] == 0


def test_tests_that_end_themselves_pass_nothing() -> None:
    assert run_tests(HALF, "assert half(4) == 2").ok
    assert not run_tests(HALF, "assert half(4) == 2\nraise SystemExit(0)\nassert half(4) == 1").ok


def test_an_expected_output_of_any_length() -> None:
    answer = {"inputs": ["1500000"], "outputs": ["x" * 1_500_000]}
    assert code_stdin("print('x' * int(input()))", answer)["score"] == 1
    assert code_stdin("print('x' * (int(input()) - 1))", answer)["score"] == 0
    assert code_stdin("while True: print('x' * 1000)", answer)["score"] == 0


@pytest.mark.parametrize(
    "response",
    [
        "1. So:\n   ```python\n   n = int(input())\n   if n:\n       print(3 * n)\n   ```\n",
        f"~~~python\n{CODE}\n~~~\nas asked",
        f"````python\n{CODE}\n````",
        f"Here:\n```python\n{CODE}\n",
        f"```python\n{CODE}\n```\nExample:\n```python\nprint(solve(2))  # 6\n```",
        f"```python\n{CODE}\n```\nExample:\n```python\n>>> thrice(2)\n6\n```",
        f"<think>I begin with ```python</think>\n```python\n{CODE}\n```",
        f"<think>\n```python\n{WRONG}\n```</think>\n```python\n{CODE}\n```",
        f"```python\n{WRONG}\n\nno, better:\n```python\n{CODE}\n```",
    ],
)
def test_where_the_program_is(response: str) -> None:
    assert code_stdin(response, THRICE)["score"] == 1
    assert code_stdin(response.replace("3 * n", "2 * n"), THRICE)["score"] == 0


def test_examples_and_thoughts_are_no_programs() -> None:
    assert python_code("```python\nprint(6)\n```\nFor example\n```python\n>>> 1\n1\n```", "last") == "print(6)\n"
    assert python_code("<think>\n```\nx\n```</think>\n```\nprint(6)\n```", "last") == "print(6)\n"


def test_the_other_mark_is_part_of_a_program() -> None:
    assert python_code("```python\nx = '''\n~~~\n'''\n```\n", "last") == "x = '''\n~~~\n'''\n"
    assert python_code("~~~python\nx = '```'\n~~~", "last") == "x = '```'\n"
    defined = "add = lambda a, b: a + b\n"
    assert python_code(f"```python\n{defined}```\n```python\nprint(add(1, 2))\n```", "last", "add") == defined


def test_what_runs_elsewhere_gets_the_imports_that_a_program_needs() -> None:
    sent: list[str] = []

    def runs(program: str, inputs: list[str], **_: Any) -> list[sandbox.CaseResult]:
        sent.append(program)
        return [sandbox.CaseResult("finished", 0, "6")] * len(inputs)

    later = "from __future__ import annotations\nprint(6)"
    for program in ("print(sum(Counter('abcabc').values()))", later):
        assert code_stdin(program, {"inputs": [""], "outputs": ["6"]}, run=runs)["score"] == 1
    namespace: dict[str, Any] = {}
    exec(sent[0], namespace)
    assert namespace["Counter"]("aab")["a"] == 2
    assert namespace["pow"] is pow  # and not that of math, which is imported too
    assert sent[1] == later


def doubles(program: str, inputs: Any, *, function: Any, seconds: float, total_seconds: float, memory_mb: int, by: int):
    """Another machine, which does as it is told and not as the program says."""
    assert program.endswith("\nanything")
    assert (function, seconds, total_seconds, memory_mb) == (None, 1.0, 9.0, 64)
    for text in inputs:
        yield sandbox.CaseResult("finished", 0, str(by * int(text)))


def test_the_limits_and_the_arguments_of_what_runs_elsewhere() -> None:
    answer = {"inputs": ["1", "2"], "outputs": ["2", "4"]}
    limits: Any = {"seconds": 1.0, "total_seconds": 9.0, "memory_mb": 64}
    for other in (partial(doubles, by=2), {"fn": doubles, "by": 2}, {"fn": f"{__name__}.doubles", "by": 2}):
        assert code_stdin("anything", answer, run=other, **limits)["score"] == 1
    assert code_stdin("anything", answer, run={"fn": doubles, "by": 1}, **limits)["passed"] == 0


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"fn": f"{__name__}.doubles"}, "missing a required argument: 'by'"),
        ({"fn": f"{__name__}.doubles", "by": 2, "of": 3}, "unexpected keyword argument 'of'"),
        ({"fn": f"{__name__}.doubles", "by": 2, "seconds": 3}, "multiple values for keyword argument 'seconds'"),
        ({"by": 2}, "None is not a callable object: expected a function of"),
        ("textwrap.dedent", "too many positional arguments"),
        ("no.module.of.mine", "cannot import 'no.module.of.mine'"),
        ("/nowhere/mine.py:run", "there is no such file"),
    ],
)
def test_a_wrong_function_is_told_when_data_are_read(other: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as told:
        check_answer(code_stdin, {"inputs": ["1"], "outputs": ["2"]}, "", {"run": other})
    assert "\n" not in str(told.value)


def test_the_sandbox_s_own_options_are_refused_elsewhere() -> None:
    with pytest.raises(ValueError, match="leave them out beside run"):
        code_stdin("x", {"inputs": ["1"], "outputs": ["2"]}, run={"fn": doubles, "by": 2}, packages=["numpy"])
