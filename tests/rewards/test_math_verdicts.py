"""Mathematics: what math-verify alone gets wrong, either way."""

import pytest

from rlprims.algorithms import use
from rlprims.data_proto import DataProto
from rlprims.rewards.pool import Pool
from rlprims.rewards.verifiers import math, without_thinking
from rlprims.trainer.scoring.rewards import verify
from rlprims.trainer.scoring.settings import RewardConfig, ScoringConfig

pytest.importorskip("math_verify")

RIGHT = [
    ("4.5e33", r"4.5 \times 10^{33}"), (r"4.5 \times 10^{33}", "4.5e33"), ("4.5E+33", r"4.5\cdot 10^{33}"),
    (r"1.6 \times 10^{-19}", "1.6e-19"), (r"10^{-3}", "0.001"), (r"10^6", "1000000"), ("-2e3", r"-2 × 10^3"),
    (r"45 \times 10^{32}", r"4.5 \times 10^{33}"), (r"\frac{9}{2} \times 10^{3}", "4500"), ("6e2+1", "601"),
    ("6m", "6m"), ("6m", "m6"), ("6m", r"6\text{m}"), (r"6\text{ m}", "6"), (r"6\text{ m}", "6m"), ("6", r"6\text{ m}"),
    ("5", "5 cm"), (r"5\text{ cm}", "5 cm"), ("3+2m", "2m+3"), (r"12\text{ m}^2", "12"),
    (r"\frac{1}{3}E_1+\frac{1}{3}E_2", r"\frac{E_1+E_2}{3}"), (r"\frac{2}{3}E", r"\frac{2E}{3}"),
    ("5", "x=5"), ("5", "2+3=5"), ("5", "x=2+3=5"), ("5", "5=x"), ("x=5", "5"), (r"\frac{1}{2}", r"y=\frac{2}{4}=0.5"),
    (r"\frac{10}{3}", r"\frac{10}{3} \approx 3.33"), (r"\sqrt{2}", r"\sqrt{2} \approx 1.414"), ("5", r"x \approx 5"),
    (r"\text{yes}", r"\text{ yes }"), ("yes", r"\mathrm{yes}"), ("(A)", r"\textbf{(A)}"),
    (r"\text{New York}", "New  York"),
    ("90", "90°"), (r"90^\circ", "90°"), (r"90^{\circ}", r"90\degree"), (r"90^\circ", r"90\text{ degrees}"),
    (r"22.5^\circ", r"\frac{45}{2}^{\circ}"), (r"5 \text{ or } 6", "5, 6"), ("5, 6", r"5 \text{ or } 6"),
    ("-2,2", r"x=-2 \text{ or } x=2"), ("x=1, y=2", "x=1,y=2"), ("mc^2", "E=mc^2"), ("[1,2]", r"x \in [1,2]"),
    ("maybe", "maybe"), (r"x \approx 5", r"x \approx 5"),
]  # fmt: skip
WRONG = [
    ("4.5e33", r"4.5 \times 10^{32}"), (r"4.5 \times 10^{33}", "4.5"), ("4.5e33", "45e33"), (r"10^6", "60"),
    ("6m", "6"), ("6", "6m"), ("6t", "6"), ("3+2m", "5m"), ("3+2m", "5"), ("6m", "6n"), (r"6m", r"6\text{ n}"),
    (r"\frac{1}{3}E+\frac{1}{3}E_1", "1/3"), (r"\frac{1}{3}E_1+\frac{1}{3}E_2", "2/3"),
    (r"\frac{1}{3}E+\frac{1}{3}E_1", "2/3"), (r"\frac{2}{3}E", "2/3"),
    ("5", "6=5"), ("5", "5=6"), ("5", "x=6=5"), ("5", "2+4=5"), ("x=5", "6=5"), ("5", r"5 \text{ (or 6)}"),
    ("5", r"x=5 \text{ or } x=6"),
    ("5", "5 (or 6)"), ("5", r"5 \text{ or } 6"), ("5", r"5 \text{, maybe } 6"), ("5", r"5 \approx 6"),
    ("5", r"6 \approx 5"), ("5", r"5 \approx 5.4"), ("5", r"5 \approx 5 \approx 6"), ("5", r"\text{not } 5"),
    ("5", r"5\text{ (if it is 6, then 6)}"), (r"\frac{10}{3}", r"\frac{10}{3} \approx 3.4"),
    (r"\text{yes}", r"\text{ no }"), ("90", "91°"), (r"\text{odd}", r"\text{even}"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "said"), RIGHT)
def test_the_same(gold: str, said: str) -> None:
    assert math(rf"\boxed{{{said}}}", gold)["score"] == 1


@pytest.mark.parametrize(("gold", "said"), WRONG)
def test_math_scores_other_answers_0(gold: str, said: str) -> None:
    assert math(rf"\boxed{{{said}}}", gold)["score"] == 0


def test_equal_text_whatever_its_size_and_depth() -> None:
    for text in ("+".join(f"x_{i}" for i in range(2000)), "{" * 30 + "3" + "}" * 30, r"\sqrt{" * 12 + "2" + "}" * 12):
        assert math(rf"\boxed{{{text}}}", text)["score"] == 1
        assert math(rf"\boxed{{ {text} }}", text)["score"] == 1
        assert math(rf"\boxed{{{text.replace('2', '4').replace('3', '4')}}}", text)["score"] == 0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (r"The final answer is \(7\).", 1),
        (r"The final answer is $7$. I hope it is correct.", 1),
        ("Final answer is: 7.", 1),
        ("The final answer is 7.0. Thanks", 1),
        (r"The final answer is \(8\).", 0),
        (r"The final answer is \(7\). No: the final answer is \(8\).", 0),
        (r"The final answer is \(7\). But \boxed{8}", 0),
        (r"The final answer is \(7", 0),
        ("The final answer is", 0),
        ("7", 0),
    ],
)
def test_the_final_answer_is(response: str, score: float) -> None:
    assert math(response, "7", final_phrase=True)["score"] == score
    assert math(response, "7")["score"] == 0


@pytest.mark.slow
def test_a_bombs_score_by_name() -> None:
    """NaN takes a group out of training, and a policy can learn to write what does not end."""
    rows = [r"\boxed{\frac{14}{2}}", r"\boxed{10^{10^{10}}}", r"\boxed{8}"]
    for timeout, score in (("nan", None), ("zero", 0.0)):
        with Pool(math, workers=1, seconds=2, preload=["math_verify"], timeout=timeout) as pool:  # type: ignore[arg-type]
            scored = pool(rows, ["7"] * 3)
        assert [scored.scores[0], scored.scores[2]] == [1, 0]
        assert scored.scores[1].isnan() if score is None else scored.scores[1] == score
        assert (scored.failures[1] is None) == (score is not None)
        assert ("limit_reached" in scored.columns) == (score is not None)
    with pytest.raises(ValueError, match="timeout"):
        Pool(math, timeout="skip")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("<think>a</think>b", "b"),
        ("<think>a</think>b<think>c</think>d", "bd"),
        ("a<think>b", "a"),
        ("a</think>b", "b"),
        ("<think>a</think>b</think>c", "c"),
        ("<think>a<think>b</think>c", "c"),
        ("a", "a"),
        ("", ""),
    ],
)
def test_without_thinking_leaves_what_follows(text: str, rest: str) -> None:
    assert without_thinking(text) == rest
    other = text.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    assert without_thinking(other, opening="[THINK]", closing="[/THINK]") == rest
    if "</think>" not in text:
        assert without_thinking(text, opened=True) == ""
    with pytest.raises(ValueError, match="tags"):
        without_thinking(text, opening="")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_thinking_is_removed_in_a_run(workers: int) -> None:
    verifier = RewardConfig(fn=use(math), workers=workers)
    scoring = ScoringConfig(thinking=("<think>", "</think>"))
    texts = [r"<think>\boxed{7}", r"<think>\boxed{8}</think>\boxed{7}", r"\boxed{7}<think>\boxed{8}"]
    rows = DataProto.from_dict(non_tensors={"response": texts, "answer": ["7"] * 3})
    assert verify(verifier, rows, scoring)["scores"].tolist() == [0, 1, 1]
    assert verify(verifier, rows, ScoringConfig())["scores"].tolist() == [1, 1, 0]
    opened = scoring.model_copy(update={"thinking_opened": True})
    assert verify(verifier, rows, opened)["scores"].tolist() == [0, 1, 0]
