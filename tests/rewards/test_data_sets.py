"""Each data set that ``by_source`` names, in its layout with rows of our own: a solution scores 1, a wrong one 0."""

import json
import sys
from typing import Any

import pytest

from rlprims.rewards import sandbox
from rlprims.rewards.verifiers import SOURCES, by_source, check_answer

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sandbox.isolation() != "namespaces", reason="no user namespaces here"
)


def block(code: str) -> str:
    return f"Here is it.\n```python\n{code}\n```"


MATHS = [
    ("lighteval/MATH", r"Thus $\boxed{\frac{3}{4}}$.", r"\frac34"),
    ("DigitalLearningGmbH/MATH-lighteval", r"$\boxed{(3,4]}$", r"3 < x \le 4"),
    ("EleutherAI/hendrycks_math", r"\boxed{x^2+1}", "1+x^2"),
    ("HuggingFaceH4/MATH-500", r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"),
    ("math-ai/math500", "p - q", "p-q"),
    ("math-ai/minervamath", "4.5e33", r"4.5 \times 10^{33}"),
    ("Hothan/OlympiadBench", [r"$\frac{1}{2n+2}$"], r"\frac{1}{2(n+1)}"),
    ("math-ai/olympiadbench", ["2,3"], "3, 2"),
    ("math-ai/amc23", "27.0", "27"),
    ("AI-MO/aimo-validation-amc", 142.0, "142"),
    ("HuggingFaceH4/aime_2024", "033", "33"),
    ("Maxwell-Jia/AIME_2024", 204, "204"),
    ("math-ai/aime24", r"\boxed{204}", "204"),
    ("math-ai/aime25", "70", "70"),
    ("opencompass/AIME2025", "588", "588"),
    ("yentinglin/aime_2025", "16", "16"),
    ("open-r1/DAPO-Math-17k-Processed", "34", "34"),
    ("AI-MO/NuminaMath-CoT", r"\boxed{20\%}", "20%"),
    ("hiyouga/geometry3k", r"2 \sqrt { 221 }", r"2\sqrt{221}"),
]
TEXTS = [
    ("openai/gsm8k", "6 * 3 = <<6*3=18>>18\n#### 18", "6 * 3 is 18.\n#### 18", "#### 19"),
    ("BytedTsinghua-SIA/DAPO-Math-17k", "34", "Answer: 34", "Answer: 35"),
    ("Idavidrein/gpqa", "C", "**Answer:** C", "**Answer:** B"),
    ("fingertap/GPQA-Diamond", "C", r"\boxed{C}", r"\boxed{A}"),
    ("searchR1_nq", {"target": ["the tower"]}, "<answer>Tower</answer>", "<answer>Bridge</answer>"),
]
HUMANEVAL = {
    "prompt": 'def add(a, b):\n    """Adds."""\n',
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(2, 3) == 5\n",
}
HUMANEVAL_PLUS = HUMANEVAL | {
    "test": """
import numpy as np

def assertion(out, exp, atol):
    if atol == 0:
        atol = 1e-6
    assert out == exp or np.allclose(out, exp, rtol=1e-07, atol=atol)

def check(candidate):
    for inp, exp in zip([[2, 3], [0.1, 0.2]], [5, 0.3]):
        assertion(candidate(*inp), exp, 0)
"""
}
MBPP = {
    "text": "Add.",
    "code": "def add(a, b):\n    return a + b",
    "test_list": ["assert add(2, 3) == 5"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
MBPP_PLUS = {
    "prompt": "Add.",
    "code": MBPP["code"],
    "test_imports": [],
    "test_list": MBPP["test_list"],
    "test": """
import numpy as np

def assertion(out, exp, atol):
    assert out == exp

for inp, exp in zip([[2, 3], [7, 1]], [5, 8]):
    assertion(add(*inp), exp, 0)
""",
}
ADD = block("def add(a, b): return a + b")
TESTED = [
    ("openai/openai_humaneval", HUMANEVAL, ADD, block("def add(a, b): return a")),
    ("evalplus/humanevalplus", HUMANEVAL_PLUS, ADD, block("def add(a, b): return round(a + b)")),
    ("google-research-datasets/mbpp", MBPP, ADD, block("def add(a, b): return 6")),
    ("evalplus/mbppplus", MBPP_PLUS, ADD, block("def add(a, b): return 5")),
]
CASES = {"inputs": ["2\n", "5\n"], "outputs": ["6\n", "15\n"]}
LISTED = [{"input": "2", "output": "6", "testtype": "stdin"}, {"input": "5", "output": "15", "testtype": "stdin"}]
CONTEST = {
    "public_tests": {"input": ["2"], "output": ["6"]},
    "private_tests": {"input": ["5"], "output": ["15"]},
    "generated_tests": {"input": [], "output": []},
}
LIVE = {
    "public_test_cases": json.dumps(LISTED[:1]),
    "private_test_cases": json.dumps(LISTED[1:]),
    "metadata": "{}",
}
LIVE_CALLED = {
    "public_test_cases": json.dumps([{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]),
    "metadata": json.dumps({"func_name": "total"}),
}
THRICE, ONLY_TWO = block("print(3 * int(input()))"), block("input()\nprint(6)")
METHOD = block("class Solution:\n    def total(self, a: List[int], b: int) -> int: return sum(a) + b")
CALLED = json.dumps({"fn_name": "total", "inputs": [[[1, 2], 3]], "outputs": [[6]]})
PROGRAMS = [
    ("codeparrot/apps", json.dumps(CASES), THRICE, ONLY_TWO),
    ("BAAI/TACO", json.dumps(CASES), THRICE, ONLY_TWO),
    ("likaixin/TACO-verified", CASES, THRICE, ONLY_TWO),
    ("deepmind/code_contests", CONTEST, THRICE, ONLY_TWO),
    ("livecodebench/code_generation_lite", LIVE, THRICE, ONLY_TWO),
    ("livecodebench", LISTED, THRICE, ONLY_TWO),
    ("codeforces", {"official_tests": LISTED}, THRICE, ONLY_TWO),
    ("codeparrot/apps", CALLED, METHOD, block("def total(a, b): return b")),
    ("livecodebench/functional", LIVE_CALLED, METHOD, block("def total(a, b): return b")),
]
ROWS: list[tuple[str, Any, str, str]] = [
    *((source, gold, rf"So $\boxed{{{said}}}$.", r"So $\boxed{5}$.") for source, gold, said in MATHS),
    *TEXTS,
    *TESTED,
    *PROGRAMS,
]


@pytest.mark.parametrize(("source", "answer", "right", "wrong"), ROWS, ids=[row[0] for row in ROWS])
def test_a_known_solution(source: str, answer: Any, right: str, wrong: str) -> None:
    check_answer(by_source, answer, source)
    assert by_source(right, answer, source)["score"] == 1
    assert by_source(wrong, answer, source)["score"] == 0


def test_each_name_of_the_hub_has_a_row() -> None:
    rows = {row[0] for row in ROWS}
    names = {name for name in SOURCES if "/" in name}
    assert [name for name in names if not any(row.startswith(name.rstrip("*")) for row in rows)] == []


def test_private_cases_that_are_a_pickle_are_refused() -> None:
    with pytest.raises(ValueError, match="not JSON"):
        check_answer(by_source, LIVE | {"private_test_cases": "eJxrYJmayQABtVOM"}, "livecodebench")
