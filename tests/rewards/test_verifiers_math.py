"""Mathematics: what means the same, what does not, and where the answer is looked for."""

import pytest

from rlprims.rewards.verifiers import math

RIGHT = [
    ("72", "72"), ("72", "72.0"), ("72", " 72 "), ("72", "72."), ("1,234", "1234"), ("1234", "1{,}234"), ("5", r"\$5"),
    ("5", "$5"), ("-3", "-3.0"), ("0.5", ".5"), ("1000", "1e3"), ("50", r"50\%"), ("0.5", r"50\%"), (r"50\%", "50"),
    (r"\frac{1}{2}", "0.5"), (r"\frac{1}{2}", r"\dfrac{1}{2}"), (r"\frac{1}{2}", r"\tfrac12"), ("1/2", r"\frac12"),
    (r"\frac{3}{4}", r"\frac{6}{8}"), (r"-\frac{1}{2}", r"\frac{-1}{2}"), (r"1\frac{1}{2}", "1.5"),
    (r"\sqrt{8}", r"2\sqrt{2}"), (r"2^{10}", "1024"), (r"\pi/2", r"\frac{\pi}{2}"), (r"3\pi", r"\pi\cdot 3"),
    ("x^2+2x+1", "(x+1)^2"), ("2x", r"x\cdot 2"), ("5", "x=5"), ("x=5", "5"),
    (r"\{1,2\}", r"\{2,1\}"), ("1,2", "2,1"), ("1, 2, 3", "3,2,1"), (r"\{1,2\}", r"\left\{1, 2\right\}"),
    ("(1,2)", r"\left(1,2\right)"), ("[1,2)", "[1, 2)"), (r"(-\infty,0)", r"(-\infty, 0)"), (r"[0,\frac12]", "[0,0.5]"),
    (r"(1,2)\cup(3,4)", r"(3,4)\cup(1,2)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
    ("5", r"5\text{ cm}"), (r"5\text{ cm}", "5"), ("12", r"12\text{ m}^2"), ("10", r"10\text{ dollars}"),
    (r"90^\circ", "90"), (r"\text{yes}", "yes"), ("A", r"\text{A}"), ("A", "(A)"), (r"\text{Monday}", "Monday"),
    ("1+2i", "2i+1"), (r"\infty", r"+\infty"),
]  # fmt: skip
WRONG = [
    ("72", "71"), ("72", "-72"), ("72", "7.2"), ("72", ""), ("72", "720"), ("12", "1,2"), ("1,2", "12"),
    ("0.5", "0.55"),
    (r"\frac{1}{2}", r"\frac{2}{1}"), (r"\frac{1}{3}", "0.33"), ("3.14", r"\pi"), (r"\sqrt{2}", "1.41"), ("50", r"5\%"),
    ("[1,2]", "(1,2)"), ("[1,2)", "(1,2]"), ("(1,2)", "(2,1)"), (r"\{1,2\}", r"\{1,2,3\}"), (r"\{1,2\}", r"\{1\}"),
    (r"(-\infty,0)", r"(-\infty,0]"), ("x^2", "x^3"), ("x+1", "y+1"), ("x=5", "x=6"), ("5", "x"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"), ("A", "B"), (r"\text{yes}", "no"),
    ("1+2i", "1-2i"), (r"\infty", r"-\infty"), ("3", r"\frac{"), ("3", "}{"), ("3", "\\"), ("3", "\0"), ("3", "三"),
    ("3", r"\input{/etc/passwd}"), ("3", "__import__('os').getpid()"), ("3", "{" * 9 + "3" + "}" * 9),
    ("3", "3" * 1001),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _installed() -> None:
    pytest.importorskip("math_verify")


@pytest.mark.parametrize(("gold", "said"), RIGHT)
def test_the_same(gold: str, said: str) -> None:
    assert math(rf"Thus the answer is $\boxed{{{said}}}$.", gold) == {"score": 1.0, "acc": 1.0, "format": 1.0}
    assert math(f"Thus\nAnswer: {said}", rf"We find $\boxed{{{gold}}}$.")["score"] == 1.0


@pytest.mark.parametrize(("gold", "said"), WRONG)
def test_math_verifier_of_other_answers(gold: str, said: str) -> None:
    assert math(rf"Thus the answer is $\boxed{{{said}}}$.", gold)["score"] == 0.0


@pytest.mark.parametrize(
    ("response", "score", "form"),
    [
        (r"\boxed{1} no, \boxed{2}", 1, 1),
        (r"\boxed{2} no, \boxed{1}", 0, 1),
        (r"\boxed{\frac{4}{2}} is all", 1, 1),
        (r"\fbox{2}", 1, 1),
        (r"\boxed{2} and then \boxed{3", 1, 1),
        (r"\boxed{2\text{ \} }}", 1, 1),
        (r"Answer: 3 then \boxed{2}", 1, 1),
        ("Answer: 3\nAnswer: 2", 1, 1),
        ("answer : $2$", 1, 1),
        ("**Answer:** 2", 1, 1),
        ("The answer is 2", 0, 0),
        ("2", 0, 0),
        ("", 0, 0),
        (r"\boxed{}", 0, 1),
        (r"\boxed 2", 1, 1),
    ],
)
def test_where_the_answer_is(response: str, score: float, form: float) -> None:
    assert math(response, "2") == {"score": score, "acc": score, "format": form}


def test_an_answer_that_is_none_is_the_callers() -> None:
    for gold in ("", " "):
        with pytest.raises(ValueError, match="answer"):
            math(r"\boxed{3}", gold)


def test_in_a_thread() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:  # where math-verify's own limit cannot work
        assert thread.submit(math, r"\boxed{x+x}", "2x").result()["score"] == 1
