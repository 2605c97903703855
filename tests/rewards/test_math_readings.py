r"""Mathematics by kinds: which two spellings are one answer, and which answer only looks like the right one.

Each kind has pairs (answer of the data, response) that are right and such that are wrong. The wrong ones are what a
policy would find: the number of the answer with something beside it.
"""

import pytest

from rlprims.rewards.verifiers import by_source, check_answer, math, multiple_choice

RIGHT = {
    "percent": [("40%", "40"), ("0.4", r"40\%"), ("40", r"40\%"), (r"40\%", "2/5"), (r"7.5\text{ percent}", "7.5％")],
    "a choice is the whole answer": [
        ("C", r"\text{C}"), ("C", r"\textbf{(C)}"), ("C", "C."), ("C", r"\text{(C) }18"), ("18", r"\textbf{(C)}\ 18"),
        ("(C) 18", "C"), ("C", "C) it melts"),
    ],
    "words that multiply": [
        ("8", r"2\text{ cubed}"),
        ("3000000", r"3\text{ million}"), (r"\$3\text{ million}", "3,000,000"), ("36", r"3\text{ dozen}"),
        ("9", r"3\text{ squared}"),
    ],
    "units": [
        (r"4\text{ candies}", r"4\text{ candy}"), ("4", "4 kg"), ("6m", r"\frac{12}{2}\text{ m}"),
        (r"2x=10\text{ m}", r"x=5\text{ m}"),
        (r"4\text{ km}", r"4\text{ kilometres}"), (r"4\text{ km}", "4 km"), ("4", r"4\,\mathrm{km}"),
        (r"4\text{ m/s}^2", r"4\text{ m}/\text{s}^2"), (r"4\text{ m/s}", r"4\frac{\text{m}}{\text{s}}"),
        (r"4\text{ m/s}", "4 meters per second"), (r"4\text{ cm}^2", "4 square centimeters"),
        ("4", r"4\text{ sq. units}"),
        (r"6\text{ ft } 3\text{ in}", "6 feet 3 inches"), (r"20^\circ\text{C}", r"20^\circ C"),
        ("11", "11 students"), (r"3\text{ widgets}", "3"),
    ],
    "currency": [
        ("6", "US$6"), (r"\$6", r"US\$6"),
        (r"\$6", "6 dollars"), (r"\$6", "6"), ("6", "€6"), (r"6\text{ euros}", "€6"), ("$6$", r"\$6.00"),
        ("6", "USD 6"),
    ],
    "bases": [("1011_2", r"1011_{2}"), ("1011_2", r"1011_{\text{two}}"), ("1011_2", "1011 base 2"), ("34", "34_{10}")],
    "angles": [
        (r"45^\circ", r"45\text{ degrees}"), (r"45^\circ", r"\frac{\pi}{4}"), (r"\frac{\pi}{4}", r"45^\circ"),
        (r"7^\circ 30'", r"7.5^\circ"), (r"45^\circ", r"\frac{\pi}{4}\text{ rad}"), ("45", r"\angle PQR = 45^\circ"),
        (r"\angle PQR = 45^\circ", "45"),
    ],
    "small and close": [
        (r"\frac{1}{2^{70}}", "2^{-70}"), (r"1-\frac{1}{3^{900}}", r"\frac{3^{900}-1}{3^{900}}"),
        ("1", r"0.\overline{9}"),
        (r"\frac{1}{5\cdot 2^{99}}", r"\frac{2^{-99}}{5}"), (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2"),
    ],
    "reasons": [("9", "9, because 18/2 = 9"), ("9", "9 since 3^2 = 9")],
    "names": [
        ("-1, 1", r"\pm 1 \mp 2"), ("8", "8 = PQ"), ("P(A)=1", r"\{P(A)=1\}"),
        ("2,5", r"x_{1,2} = 2, 5"), ("2,5", "x_1 = 5, x_2 = 2"), ("2,5", r"t = 2 \text{ or } t = 5"),
        ("(4,-3)", "(x,y) = (4,-3)"), ("(x,y)=(4,-3)", "(4,-3)"), ("3,-3", r"x = \pm 3"), ("8", "f(2) = 8"),
        ("8", "PQ = 8"), ("8", r"\text{Area} = 8"), (r"\frac38", r"P(A) = \frac{3}{8}"), ("a=1, b=2", "b = 2, a = 1"),
    ],
    "equations of one line": [
        ("y=3x-1", "3x - y - 1 = 0"), ("2x+3y=6", "4x+6y-12=0"), ("y=3x-1", "3x-1"), ("x^2+y^2=9", "9 - y^2 = x^2"),
    ],
    "intervals": [
        (r"(3,\infty)", r"\{x | x>|-3|\}"), (r"(-\infty,1)\cup(4,\infty)", "x<1, x>4"),
        (r"\infty", "infinity"), (r"(-\infty,2]", r"x\le 2"),
        ("(2,7]", r"2 < x \le 7"), (r"2<x\leq 7", "(2,7]"), ("[2,7)", "[2,7["), ("(2,7)", "]2,7["),
        (r"(-\infty,2)", "x<2"),
        (r"x\ge 2", "2 ≤ x"), (r"x\ge 2", r"x\in[2,\infty)"), (r"(-\infty,1)\cup(4,\infty)", r"x<1\text{ or }x>4"),
        (r"(-\infty,2)\cup(2,\infty)", r"x\neq 2"), (r"\mathbb{R}\setminus\{2\}", r"x\ne 2"), ("(1,4)", "x>1 and x<4"),
        (r"\{x \mid x>1\}", r"(1,\infty)"), (r"y\le 3x+1", r"3x+1\ge y"),
    ],
    "Unicode": [
        (r"\frac34", "¾"), (r"2\sqrt{5}", "2√5"), (r"5\times10^{14}", "5×10¹⁴"), ("2.5", "2½"), ("(3,4)", "（3，4）"),
        ("3,4", "3、4"), ("8", "８。"), ("x^3", "x³"), ("x_1", "x₁"), (r"\frac{\pi}{6}", "π/6"), (r"\emptyset", "∅"),
    ],
    "where the answer is defined": [(r"2\ln x", r"\ln x^2"), (r"\sqrt{x}\sqrt{x}", "x")],
    "sets by a condition": [(r"x>2", r"\{x \in \mathbb{R} : x>2\}"), (r"(2,\infty)", r"\{x \mid x>2\}")],
    "sets": [(r"\emptyset", r"\varnothing"), (r"\emptyset", r"\{\}"), ("6", r"\{6\}"), (r"\{1,2\}", "2, 1")],
    "separators": [("2.75", "2{,}75"), ("2750", "2{,}750"), ("2750", r"2\,750"), (r"32,\!348", "32348"),
        ("2,750", "2750"), ("100, 250", "100,250")],
    "times of day": [(r"4\text{ p.m.}", "4:00 PM"), ("4:30 p.m.", r"4{:}30\text{ pm}".replace("{:}", ":"))],
    "exact values": [
        ("2", r"\lg 100"), ("4", r"\lceil 3.2\rceil"), ("3", r"\lfloor 3.7\rfloor"),
        (r"\frac{\sqrt2}{2}", r"\sin 45^\circ"), (r"\frac{\sqrt6+\sqrt2}{4}", r"\cos\frac{\pi}{12}"),
        ("5", r"\log_2 32"),
        (r"\ln 7", r"\log_e 7"), (r"\frac{\pi}{3}", r"\arctan\sqrt3"), (r"\frac{\pi}{3}", r"\tan^{-1}(\sqrt3)"),
        (r"\cos 2x", r"1-2\sin^2 x"), ("2^{10}", "2^10"), (r"\binom62", "15"), ("|x|", r"\sqrt{x^2}"),
    ],
    "repeating decimals": [
        (r"\frac23", said) for said in (r"0.\overline{6}", r"0.\bar6", r"0.\dot{6}", "0.(6)", "0.666...", "0.6̅")
    ] + [(r"\frac{7}{12}", r"0.58\overline{3}"), (r"\frac{3}{11}", r"0.2727\ldots"),
        (r"\frac27", r"0.\dot28571\dot4")],
    "vectors and cases": [
        (r"\begin{pmatrix}2&4\\6&8\end{pmatrix}", r"2\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\begin{cases}1&x>0\\2&x\le0\end{cases}", r"\begin{cases}1\text{ if }x>0\\2\text{ if }x\le0\end{cases}"),
        (r"\begin{pmatrix}3\\4\end{pmatrix}", "(3,4)"), ("(3,4)", r"\begin{bmatrix}3\\4\end{bmatrix}"),
        (r"\langle 3,4\rangle", "(3,4)"),
        (r"\begin{cases}1&x>0\\2&x\le0\end{cases}", r"\begin{cases}2&\text{if }x\le0\\1&\text{if }x>0\end{cases}"),
    ],
    "fractions": [(r"-\frac23", "-2./3"), ("5/3", "1 2/3"), ("3:5", r"\frac35"), ("3:5", "6:10"), ("1:2:3", "2:4:6")],
}  # fmt: skip
WRONG = {
    "percent": [("40%", "0.4%"), ("4%", "400%"), (r"40\%", "4000%"), ("40", r"0.4\%"), ("1", r"\%"), ("4", r"4\%\%")],
    "a choice is the whole answer": [
        ("C", r"\text{B and }C"), ("C", "all except C"), ("C", r"\text{not }C"), ("C", "B, C"),
        ("C", r"B\text{ or }C"),
        ("C", "(C) is wrong, it is (D)"), ("C", "(C) or (D)"), ("C", "BC"), ("C", "(D) 18"), ("18", "(C) 19"),
        ("C", "B=C"), ("C", "c"), ("C", "(C"), ("C", "C. D"),
    ],
    "words that change a number": [
        ("3", said) for said in (
            r"3\text{ million}", r"3\text{ dozen}", r"3\text{ squared}", r"3\text{ is wrong, it is four}",
            r"3\text{ or four}", r"3\text{ halves}", r"3\text{ thousandths}", "about 3", "3 or 4", "at least 3",
            "not 3", r"3\text{ times}", r"\text{either }3", r"3\text{ something}", r"3\text{ quarters}", r"3\text{K}",
            "3K", "three", "3k", "3!", r"3\text{ (4)}",
        )
    ],
    "units": [
        (r"6\text{ euros}", "$6"), ("1", r"5\text{ ft }3\text{ in}"), ("4", r"4\text{ M}"), ("6+x", r"(6+x)\text{ m}"),
        ("2listen", "2silent"),
        (r"4\text{ km}", r"4\text{ m}"), ("4 km", "4 m"), (r"4\text{ m/s}", r"4\text{ m/s}^2"),
        (r"4\text{ m}", r"4\text{ m}^2"),
        (r"\$4", r"4\text{ cents}"), (r"\$4", "€4"), (r"4\text{ hours}", "4 minutes"), (r"4\text{ cats}", "4 dogs"),
        ("1", r"\text{m}"), (r"12\text{ inches}", "1 foot"), (r"4\text{ kg}", "4 grams"),
        (r"3\text{ widgets}", "3 cats"), (r"3\text{ widgets}", r"3\text{ gadgets}"),
    ],
    "subscripts and primes": [
        ("5", "1011_2 = 5"), (r"\pi", r"180^\circ\text{ m}"),
        ("1011_2", "1011_3"), ("34", "34_6"), ("34_6", "34"), ("1011_2", "11"), ("40", "40'"), (r"40^\circ", "40'"),
        ("40'", "40''"), ("x_1", "x_2"), ("x", "x_1"), ("x", "x'"), (r"\pi", r"\pi^\circ"), (r"90^\circ", r"\pi"),
        ("45", r"\frac{\pi}{4}"),
    ],
    "small and close": [
        (r"\frac{1}{2^{70}}", r"\frac{1}{2^{71}}"), (r"1-\frac{1}{3^{900}}", r"1-\frac{1}{3^{901}}"),
        ("0", "10^{-40}"),
        (r"\frac{1}{5\cdot 2^{99}}", r"\frac15"), (r"\sqrt3", r"\sqrt{3+10^{-300}}"), (r"\pi(1-2^{-500})", r"\pi"),
        (r"e^{-300}", "0"), ("1000000009", "1000000010"), (r"\frac17", "0.142857142857"), (r"\sqrt5", "2.2360679775"),
        (r"\pi", "3.14159265358979"), ("x^2", "x^{2.0000001}"), ("y=2x", "y=2x+0.000001"),
    ],
    "reasons": [("9", "8, because 9 is wrong"), ("9", "9, because no, it is 8"), ("9", "9 and 8")],
    "names": [
        ("(4,-3)", "(x,y)=(-3,4)"), ("(x,y)=(4,-3)", "(y,x)=(4,-3)"), ("2,5", "x=2"), ("2", r"x=\pm 2"),
        ("8", "2x=16"),
        ("3", "x^2=9"), ("2,5", "x=2, y=5"), ("x=1, y=2", "x=2, y=1"), ("8", "x+y=8"), ("9", "5=4+5=9"),
    ],
    "equations of one line": [
        ("y=3x-1", "3x+y-1=0"), ("x^2+y^2=9", "x^2+y^2=3"), ("y=x^2", "x=y^2"), ("y=3x", r"y\le 3x"),
        ("x=3", r"x\ge 3"),
    ],
    "intervals": [
        ("(1,3)", "x<3 or x>1"), ("x<3", "x<3 and x<1"), ("3", "[3)"), ("3", "(3]"),
        ("(2,7]", r"2\le x\le 7"), ("(2,7)", "[2,7]"), ("[2,7)", "]2,7]"), ("x<2", "x>2"), ("x<2", r"x\le 2"),
        ("(1,4)", "x<1 or x>4"),
        (r"x\ge2", r"2\ge x"), ("2", "x>2"), ("x>2", "2"), (r"(1,2)\cup(3,4)", "(1,4)"), (r"x\ne 2", "x=2"),
        (r"y\le 3x", r"y\ge 3x"),
    ],
    "spaces and separators": [("34", "3 4"), ("34", r"3\,4"), ("1200", "1, 200"), ("100", "1,00"), ("12", "3 4"),
        ("6", "2 3"), ("30", "{5}6"), ("0", "2^{1}0")],
    "times of day": [("4:00 p.m.", "4:00 a.m."), ("4:00 p.m.", "5:00 p.m.")],
    "exact values": [(r"\ln(-x^2-1)", r"\ln(-x^2-2)"),
        (r"\frac{\sqrt3}{2}", r"\sin 60"), (r"\ln 7", r"\log_7 7"), ("|x|", "x"),
        (r"\ln x^2", r"2\ln x"), ("0", r"\frac00")],
    "repeating decimals": [
        (r"\frac23", "0.66..."),
        (r"\frac23", "0.666"), (r"\frac23", r"0.\overline{67}"), (r"\frac23", "0.667..."), ("3.14", "3.14..."),
        ("7", r"7\ldots"),
    ],
    "vectors and cases": [
        (r"\begin{pmatrix}2&3\\4&5\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}+1"),
        (r"\begin{pmatrix}3\\4\end{pmatrix}", "(4,3)"), ("(3,4)", "[3,4]"), ("(3,4)", "3,4"), ("(3,4)", "(3,4,5)"),
        ("5", "5,5"),
        (r"\begin{cases}1&x>0\\2&x\le0\end{cases}", r"\begin{cases}2&x>0\\1&x\le0\end{cases}"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    ],
    "names of points": [("ABC", "abc"), (r"\triangle ABC", r"\triangle abc")],
    "sets by a condition": [
        (r"(2,\infty)", r"\{x^2 : x>2\}"), (r"(2,\infty)", r"\{x \in (0,3) \mid x>2\}"),
        (r"x>2", r"\{x \in \mathbb{Z} : x>2\}"),
    ],
    "what is not known": [
        ("6", said) for said in (
            r"\not 6", r"\cancel{6}", r"\phantom{6}7", r"6\phantom{7}", r"6\pmod 7", r"6 \neq 7", "6 < 7",
            r"6\Rightarrow 7",
            "6;7", r"6\\7", "6|7", "(6", "6)", "6 mod 7", "6?", r"\overline{6}7", r"6\to 7", r"6^1_2", "6, ",
        )
    ],
}  # fmt: skip


def _all(kinds: dict[str, list[tuple[str, str]]]) -> list[object]:
    return [pytest.param(*pair, id=f"{kind}-{pair[0]}-{pair[1]}") for kind, pairs in kinds.items() for pair in pairs]


@pytest.mark.parametrize(("gold", "said"), _all(RIGHT))
def test_the_same(gold: str, said: str) -> None:
    assert math(rf"So $\boxed{{{said}}}$.", gold)["score"] == 1


@pytest.mark.parametrize(("gold", "said"), _all(WRONG))
def test_math_reads_other_answers_as_other(gold: str, said: str) -> None:
    assert math(rf"So $\boxed{{{said}}}$.", gold)["score"] == 0


@pytest.mark.parametrize("kind", sorted(RIGHT.keys() - {"percent", "currency", "angles"}))
def test_a_right_answer_is_no_other_answer(kind: str) -> None:
    """Each answer of a kind against the responses to the kind's other answers."""
    pairs = [pair for pair in RIGHT[kind] if "18" not in pair]
    equal = {gold: {other for other, _ in pairs if math(rf"\boxed{{{other}}}", gold)["score"]} for gold, _ in pairs}
    for gold, _ in pairs:
        for other, said in pairs:
            is_right = other in equal[gold] or gold in equal[other]
            assert math(rf"\boxed{{{said}}}", gold)["score"] <= is_right, (gold, said)


@pytest.mark.parametrize(
    "response",
    [
        "**Answer:** 12", "Answer: **12**", "**Answer: 12**", "__Answer__: 12", "### Answer\n\n12",
        "## Final Answer\n**12**",
        "**Final answer**\n12", "Answer:\n\n$$\n12\n$$", "Answer：12", r"so \boxed 12", r"so \boxed {12}",
        r"\boxed{11} no, \boxed 12",
        "Answer: 12, because 24/2 = 12", "Answer: $12$.", "answer: `12`",
    ],
)  # fmt: skip
def test_marked_in_markdown(response: str) -> None:
    assert math(response, "12") == {"score": 1.0, "acc": 1.0, "format": 1.0}
    assert math(response, "13") == {"score": 0.0, "acc": 0.0, "format": 1.0}


@pytest.mark.parametrize("response", ["**Answer:** C", "Answer: **C**", "### Answer\nC", "**Answer: (C)**"])
def test_a_choice_marked_in_markdown(response: str) -> None:
    assert multiple_choice(response, "C")["score"] == 1
    assert multiple_choice(response, "B")["score"] == 0


def test_a_heading_in_a_sentence_marks_nothing() -> None:
    assert math("The answer\n12", "12")["format"] == 0
    assert math("We answer 12", "12")["format"] == 0


@pytest.mark.parametrize(
    "gold", [r"\frac{", r"\frac{1}{2", r"\frac{1}{2}}", "forty two", "three million", r"\sqrt", "2+", "x=", ""]
)
def test_an_answer_that_cannot_be_read_raises_when_the_data_is_read(gold: str) -> None:
    for source in ("math500", "numina_x"):
        with pytest.raises(ValueError, match="answer"):
            check_answer(by_source, gold, source)
    with pytest.raises(ValueError, match="answer"):
        math(r"\boxed{7}", gold)


@pytest.mark.parametrize(
    "gold",
    [
        "Monday",
        r"\text{no solution}",
        r"3\text{ widgets}",
        r"3\text{ log}",
        r"3\widget",
        "3,",
        r"\int_0^1 f",
        "7",
        7,
        [r"\frac12"],
        r"so \boxed{7}",
        "(3,4]",
    ],
)
def test_an_answer_that_can_be_read_raises_nothing(gold: object) -> None:
    check_answer(by_source, gold, "math500")
    text = gold[0] if isinstance(gold, list) else str(gold)
    assert math(text if "boxed" in text else rf"\boxed{{{text}}}", gold)["score"] == 1  # type: ignore[arg-type]
