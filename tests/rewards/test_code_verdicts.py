"""Right code scores 1 and wrong code 0, in the forms in which data sets write tests and models write answers."""

import json
import sys
import time
from typing import Any

import pytest

from rlprims.rewards import sandbox
from rlprims.rewards.pool import Pool
from rlprims.rewards.sandbox import Limits, run_cases
from rlprims.rewards.verifiers import by_source, code_asserts, code_stdin
from rlprims.rewards.verifiers._blocks import fenced_blocks
from tests.rewards.real_data import humaneval

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sandbox.isolation() != "namespaces", reason="no user namespaces here"
)
TWICE = {"inputs": ["3\n", "5\n"], "outputs": ["6\n", "10\n"]}
CODE = "print(2 * int(input()))"


@pytest.mark.parametrize(
    "response",
    [
        f"```python\n{CODE}\n```\nSample output:\n```\n6\n```",
        f"```python\n{CODE}\n```\nRun it:\n```bash\npython main.py < input\n```",
        f"```Python3\n{CODE}\n```\n```text\n6\n```\n```cpp\nint main() {{}}\n```",
        f"First idea:\n```python\nprint(1)\n```\nBetter:\n```py\n{CODE}\n```",
        f"So:\n\n```\n{CODE}\n```",
        f"So: ```python\n{CODE}```",
        f"1. ```python title=main.py\n{CODE}\n```\n```output\n6\n```",
        CODE,
    ],
)
def test_the_program_is_the_last_python_block(response: str) -> None:
    assert code_stdin(response, TWICE)["score"] == 1


def test_blocks_joined() -> None:
    parts = "```python\ndef twice(x): return 2 * x\n```\nand\n```python\nprint(twice(int(input())))\n```\n```\n6\n```"
    assert code_stdin(parts, TWICE)["score"] == 0
    assert code_stdin(parts, TWICE, blocks="joined")["score"] == 1
    with pytest.raises(ValueError, match="blocks"):
        code_stdin(parts, TWICE, blocks="first")  # type: ignore[arg-type]


def test_of_several_blocks_the_one_that_defines_the_function() -> None:
    parts = "```python\ndef twice(x):\n    return 2 * x\n```\nFor example:\n```python\nassert twice(2) == 4\n```"
    assert code_asserts(parts, {"test": "assert twice(4) == 8", "entry_point": "twice"})["score"] == 1
    assert code_asserts(parts, {"test": "assert twice(4) == 9", "entry_point": "twice"})["score"] == 0


def test_blocks_that_are_none_and_a_hostile_megabyte() -> None:
    assert fenced_blocks("use ``` for code in prose, as you know\n1") == []
    assert fenced_blocks("```python\nnever closed") == []
    began = time.monotonic()
    for hostile in ("`" * 10**6, "```\n" * 250_000, "```a" * 250_000, "` " * 500_000, "```python\n" + "x\n" * 500_000):
        fenced_blocks(hostile)
    assert time.monotonic() - began < 20


CALLS = [
    ({"fn_name": "add", "inputs": [[1, 2], [-1, 1]], "outputs": [3, 0]}, "def add(a, b): return a + b"),
    (
        {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]},
        "class Solution:\n    def add(self, a, b): return a + b",
    ),
    ({"fn_name": "add", "inputs": ["[1]\n[2]"], "outputs": ["[1, 2]"]}, "def add(a, b): return a + b"),
    ({"fn_name": "add", "inputs": [["a", "b"]], "outputs": ["ab"]}, "def add(a, b): return a + b"),
    ({"fn_name": "add", "inputs": [[1, [2]]], "outputs": [[[1, [2]]]]}, "def add(a, b): return (a, tuple(b))"),
    ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [{"1": 2}]}, "def add(a, b): return {a: b}"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "right"), CALLS)
def test_call_based_cases(answer: dict[str, Any], right: str) -> None:
    wrong = ["def add(a, b): return None", "def other(a, b): return a + b", "", "def add(a, b): raise StopIteration"]
    wrong += ["import os; os._exit(0)", "def add(a, b):\n    import os\n    os._exit(0)", "def add(a, b): return True"]
    wrong += ["class E:\n    def __eq__(self, other): return True\ndef add(a, b): return E()"]
    for as_json in (False, True):
        given: Any = json.dumps(answer) if as_json else answer
        assert by_source(f"```python\n{right}\n```", given, "taco")["score"] == 1
    assert [code_stdin(code, answer, seconds=2)["score"] for code in wrong] == [0] * len(wrong)


def test_true_is_not_one() -> None:
    for expected, wrong in ((True, 1), (1, True), (0, False), ("1", 1), ([], None)):
        answer = {"fn_name": "f", "inputs": [[]], "outputs": [expected]}
        assert code_stdin(f"def f(): return {expected!r}", answer)["score"] == 1
        assert code_stdin(f"def f(): return {wrong!r}", answer)["score"] == 0


MBPP = {
    "text": "Write a function to add two numbers.",
    "code": "import math\ndef sum(a, b):\n    return a + b",
    "test_list": ["assert sum(10, 15) == 25", "assert sum(1, 2) == 3"],
    "test_setup_code": "",
    "challenge_test_list": [],
}


@pytest.mark.slow
def test_rows_of_mbpp() -> None:
    """A function that Python has too: the data set's solution tells that it is the answer's."""
    for answer in (MBPP, json.dumps(MBPP)):
        assert by_source("def sum(a, b): return a + b", answer, "mbpp")["score"] == 1
        for wrong in ("def sum(a, b): return 25", "", "def add(a, b): return a + b"):
            assert code_asserts(wrong, answer)["score"] == 0
    for listed in (["assert near(1.0) > 0", "assert near(2.0) > 1"], json.dumps(["assert near(1.0) > 0"])):
        assert code_asserts("def near(x): return x", listed)["score"] == 1
        assert code_asserts("def near(x): return -x", listed)["score"] == 0
    imports = {"test_imports": ["import math"], "test_list": ["assert math.isclose(third(1), 1 / 3)"]}
    assert code_asserts("def third(x): return x / 3", imports)["score"] == 1


def test_imports_and_helpers_of_the_prompt_stand_before_a_block() -> None:
    prompt = "from typing import List\nimport math\n\nSHIFT = 2\n\ndef helper(x): return x + SHIFT\n\n\n"
    prompt += 'def total(values: List[int]) -> int:\n    """Adds."""\n'
    answer = {"prompt": prompt, "entry_point": "total", "test": "def check(f): assert f([1, 2]) == 5"}
    block = "```python\nfrom __future__ import annotations\ndef total(values: List[int]) -> int:\n"
    block += "    return helper(math.floor(sum(values)))\n```"
    assert code_asserts(block, answer)["score"] == 1
    assert code_asserts(block.replace("helper(", "(-1 + "), answer)["score"] == 0
    unfinished = answer | {"prompt": prompt.replace('    """Adds."""\n', "")}
    assert code_asserts(block, unfinished)["score"] == 1
    stub = "class Solution:\n    def total(self, values: List[int]) -> int: return sum(values)"
    calls = {"fn_name": "total", "inputs": [[[1, 2]]], "outputs": [3]}
    assert code_stdin(stub, calls)["score"] == 1  # LiveCodeBench's harness imports List
    assert code_stdin(stub, calls | {"prompt": "from typing import List"})["score"] == 1


@pytest.mark.slow
def test_each_problem_of_humaneval_as_a_block_without_its_imports() -> None:
    """What chat models write: the function alone."""
    for problem in humaneval()[:20]:
        name = problem["entry_point"]
        code = problem["prompt"] + problem["canonical_solution"]
        alone = code[code.rindex(f"def {name}(") :]
        answer = {key: problem[key] for key in ("prompt", "test", "entry_point")}
        assert code_asserts(f"Here you are:\n```python\n{alone}\n```\n```\nOutput\n```", answer)["score"] == 1, name


@pytest.mark.slow
def test_many_cases_within_a_pools_limit() -> None:
    """Each in an interpreter of its own they took longer than the pool gives, and right answers had no score."""
    many = {"inputs": [f"{i}\n" for i in range(150)], "outputs": [str(2 * i) for i in range(150)]}
    calls = {"fn_name": "f", "inputs": [[i] for i in range(150)], "outputs": [2 * i for i in range(150)]}
    last = "x = int(input())\nprint(2 * x if x < 149 else 0)"
    # All in one process they take two seconds; on a machine with much else to do several times that.
    with Pool(code_stdin, {"total_seconds": 170.0}, workers=1, seconds=180.0) as pool:
        scored = pool([CODE, last, "def f(x): return 2 * x"], [many, many, calls])
    assert scored.failures == [None] * 3
    assert scored.scores.tolist() == [1, 0, 1]


@pytest.mark.slow
def test_a_limit_for_each_case_and_one_for_all() -> None:
    answer = {"inputs": ["1", "30", "2"], "outputs": ["1", "30", "2"]}
    sleepy = "import time\nx = int(input())\ntime.sleep(x if x > 9 else 0)\nprint(x)"
    began = time.monotonic()
    assert code_stdin(sleepy, answer, seconds=1, partial=True)["passed"] == pytest.approx(2 / 3)
    assert code_stdin(sleepy, answer, seconds=1)["score"] == 0
    always = {"inputs": ["20"] * 50, "outputs": ["20"] * 50}
    assert code_stdin(sleepy, always, seconds=1, total_seconds=2, partial=True)["passed"] == 0
    assert time.monotonic() - began < 30
    with pytest.raises(ValueError, match="total_seconds"):
        code_stdin(sleepy, answer, seconds=20, total_seconds=8)


def test_stop_early_and_a_cap() -> None:
    cases = {"inputs": ["1", "2", "3", "4"], "outputs": ["2", "9", "6", "8"]}
    assert code_stdin(CODE, cases, partial=True)["passed"] == 0.75
    assert code_stdin(CODE, cases)["passed"] == 0.25
    assert code_stdin(CODE, cases, partial=True, stop_early=True)["passed"] == 0.25
    assert code_stdin(CODE, cases, stop_early=False) == {"score": 0.0, "acc": 0.0, "passed": 0.75}
    assert code_stdin(CODE, cases, max_cases=1)["score"] == 1
    with pytest.raises(ValueError, match="max_cases"):
        code_stdin(CODE, cases, max_cases=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("printed", "expected", "passes"),
    [
        ("1 2\n3", "1 2\n3", ("lines", "tokens", "floats")),
        ("1 2 \n3\n\n", "1 2\n3", ("lines", "tokens", "floats")),
        ("1  2 3", "1 2\n3", ("tokens", "floats")),
        ("0.333333333", "0.3333333", ("floats",)),
        ("1e3 yes", "1000.0 yes", ("floats",)),
        ("0.3334", "0.3333", ()),
        ("nan", "1", ()),
        ("1 2", "1 2 3", ()),
        ("inf", "1e999", ()),
        ("yes", "no", ()),
    ],
)
def test_comparisons(printed: str, expected: str, passes: tuple[str, ...]) -> None:
    answer = {"inputs": [""], "outputs": [expected]}
    found = [c for c in ("lines", "tokens", "floats") if code_stdin(f"print({printed!r})", answer, compare=c)["score"]]
    assert tuple(found) == passes


def test_values_within_a_tolerance() -> None:
    answer = {"fn_name": "f", "inputs": [[]], "outputs": [[0.1, 2000.0]]}
    code = "def f(): return (0.1000001, 2000.001)"
    assert code_stdin(code, answer)["score"] == 0
    assert code_stdin(code, answer, compare="floats")["score"] == 1
    assert code_stdin(code, answer, compare="floats", tolerance=1e-8)["score"] == 0


def divides(given: str, output: str, expected: str) -> bool:
    """Any proper divisor will do."""
    return 1 < int(output) < int(given) and int(given) % int(output) == 0


def test_a_checker() -> None:
    answer = {"inputs": ["12"], "outputs": ["2"]}
    for checker in (divides, f"{__name__}.divides"):
        assert [code_stdin(f"print({x})", answer, checker=checker)["score"] for x in ("6", "4", "5", "'?'")] == [
            1,
            1,
            0,
            0,
        ]
    with pytest.raises(ValueError, match="returns False for the first case's expected output"):
        code_stdin("print(2)", {"inputs": ["12"], "outputs": ["5"]}, checker=divides)


UNTESTABLE: list[tuple[Any, str]] = [
    ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "arguments of fn_name as a list"),
    ({"fn_name": "f", "inputs": ["a"], "outputs": ["1"]}, "not JSON"),
    ({"fn_name": "f x", "inputs": [[1]], "outputs": [1]}, "name of a function"),
    ({"inputs": [[1, 2]], "outputs": [3]}, "with fn_name they are arguments"),
    ({"inputs": ["1"], "outputs": [3]}, "expected texts in outputs"),
    ({"inputs": "1", "outputs": "1"}, "expected inputs and outputs in the answer"),
    ([1], "expected inputs and outputs in the answer"),
    ("{", "not JSON"),
]


@pytest.mark.parametrize(("answer", "why"), UNTESTABLE)
def test_cases_that_cannot_be_tested_raise(answer: Any, why: str) -> None:
    for response in ("print(1)", ""):
        with pytest.raises(ValueError, match=why):
            code_stdin(response, answer)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("assert sum([1, 2]) == 3", "call no function of the response"),
        ("assert 1 == 1", "call no function of the response"),
        ("def f(x): return x\nassert f(1) == 1", "call no function of the response"),
        ("assert f(", "not Python"),
        ({"test_list": []}, "expected tests in the answer"),
        ("assert apply(lambda x: x, 1) == 1", "apply cannot be called by these tests: got a function"),
        (
            {"test_setup_code": "class Node: pass", "test_list": ["assert depth(Node()) == 1"]},
            "got a Node, expected plain data",
        ),
    ],
)
def test_tests_that_cannot_be_run_raise(answer: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        code_asserts("def apply(f, x): return f(x)\ndef depth(x): return 1", answer)


@pytest.mark.slow
def test_cases_of_one_program_do_not_cost_each_other() -> None:
    code = "import os, sys, time, threading, atexit\nx = input()\nif x == 'kill': os.kill(os.getpid(), 9)\n"
    code += "if x == 'hang': time.sleep(99)\nif x == 'flood':\n    while True: print('x' * 1000)\n"
    code += "if x == 'thread': threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()\n"
    code += "if x == 'leave' and os.fork() == 0: time.sleep(99)\nif x == 'exit': sys.exit(3)\n"
    code += "if x == 'all': print(repr(sys.stdin.read()), __name__)\natexit.register(lambda: print('bye'))"
    inputs = ["kill", "hang", "flood", "thread", "leave", "exit", "all\nä\n1", "ok"]
    found = list(run_cases(code, inputs, limits=Limits(seconds=4)))
    assert [(case.status, case.code) for case in found] == [
        *[("signal", 9), ("timeout", None), ("output limit", None), ("finished", 0)],
        *[("finished", 0), ("finished", 3), ("finished", 0), ("finished", 0)],
    ]
    assert sorted(found[3].output.split()) == ["bye", "late"]
    assert found[6].output == "'ä\\n1' __main__\nbye\n"
    assert found[7].output == "bye\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.kill(os.getppid(), 9)\nprint(6)",
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'[\"exit\",0,2]\\n6\\n')\n    except OSError: pass",
        "raise SystemExit(0)",
        "syntax error (",
        "\0",
        "while True: pass",
    ],
)
def test_a_program_that_attacks_what_runs_it_earns_nothing(code: str) -> None:
    assert code_stdin(code, TWICE, seconds=1, partial=True)["passed"] == 0
    assert code_stdin(CODE, TWICE, seconds=30, total_seconds=60)["score"] == 1
