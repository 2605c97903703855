"""Verifiers read what a model wrote: rightly, quickly, and without running it."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlprims.rewards.verifiers import gsm8k, tagged_answer

GOLD = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n48+24 = 72 in all.\n#### 72"


@pytest.mark.parametrize("said", ["72", "72.0", "72.00", " 72 ", "$72", "+72", "72 clips", "72.", "072"])
def test_gsm8k_reads_a_number_in_other_clothes(said: str) -> None:
    assert gsm8k(f"So it is #### {said}", GOLD)["score"] == 1


@pytest.mark.parametrize("said", ["71", "-72", "7 2", "0.72", "72.5", "720", "", "seventy-two"])
def test_gsm8k_of_another_number(said: str) -> None:
    assert gsm8k(f"So it is #### {said}", GOLD)["score"] == 0


@pytest.mark.parametrize(
    ("said", "gold"),
    [("1,234", "1234"), ("1234.0", "#### 1,234"), ("$5", "5"), ("$1,000,000", "1000000"), (".5", "0.5"), ("-3", "-3")],
)
def test_gsm8k_reads_separators_currencies_and_signs(said: str, gold: str) -> None:
    assert gsm8k(f"#### {said}", gold)["score"] == 1


@pytest.mark.parametrize("said", ["1,2", "1,23", "12,34,567", "1,2345", "1234,567", "1,200,5"])
def test_a_comma_of_gsm8k_has_three_digits_after_it_or_parts_two_numbers(said: str) -> None:
    assert gsm8k(f"#### {said}", said.replace(",", ""))["score"] == 0  # which of the two is the answer?
    with pytest.raises(ValueError, match="with a number, and only one"):
        gsm8k("#### 12", f"#### {said}")


def test_gsm8k_without_a_mark_reads_the_last_of_a_list() -> None:
    assert gsm8k("x is one of 3,5", "5")["score"] == 1


def test_gsm8k_takes_the_last_mark() -> None:
    assert gsm8k("#### 71 no wait\n#### 72", GOLD)["score"] == 1
    assert gsm8k("#### 72 no wait\n#### 71", GOLD)["score"] == 0


def test_gsm8k_without_a_mark_takes_the_last_number_unless_strict() -> None:
    assert gsm8k("first 70, then 72", GOLD) == {"score": 1.0, "acc": 1.0, "format": 0.0}
    assert gsm8k("first 70, then 72", GOLD, strict=True) == {"score": 0.0, "acc": 0.0, "format": 0.0}


def test_gsm8k_takes_an_answer_mark() -> None:
    assert gsm8k("Q: how many?\nA: 72", GOLD, strict=True) == {"score": 1.0, "acc": 1.0, "format": 1.0}


def test_gsm8k_compares_large_numbers_exactly() -> None:
    assert gsm8k("#### 9007199254740993", "9007199254740993")["score"] == 1
    assert gsm8k("#### 9007199254740992", "9007199254740993")["score"] == 0


@pytest.mark.parametrize("strict", [False, True])
def test_gsm8k_refuses_a_gold_without_a_number(strict: bool) -> None:
    with pytest.raises(ValueError, match="'seventy', expected a text with a number"):
        gsm8k("#### 72", "seventy", strict=strict)


@pytest.mark.parametrize(
    ("response", "score", "form"),
    [
        ("<answer>4</answer>", 1, 1),
        ("<answer> 4\n</answer>", 1, 1),
        ("<answer>5</answer><answer>4</answer>", 1, 1),
        ("<answer>4</answer><answer>5</answer>", 0, 1),
        ("<answer>44</answer>", 0, 1),
        ("4", 0, 0),
        ("<answer>4", 0, 0),
        ("</answer>4<answer>", 0, 0),
        ("", 0, 0),
    ],
)
def test_tags(response: str, score: float, form: float) -> None:
    assert tagged_answer(response, "4") == {"score": score, "acc": score, "format": form}


def test_another_tag() -> None:
    assert tagged_answer("<final>yes</final>", "yes", tag="final")["score"] == 1


HOSTILE = {
    "digits": "1" * 10**6,
    "commas": "1," * (10**6 // 2),
    "dollars": "$" * 10**6,
    "minus signs": "-" * 10**6,
    "dots": "1." * (10**6 // 2),
    "marks": "####" * (10**6 // 4),
    "tags": "<answer>" * (10**6 // 8),
    "closing tags": "</answer>" * (10**6 // 9),
    "spaces": " " * 10**6,
    "exponents": "9e999999999 " * (10**6 // 12),
    "braces": "{" * 10**6,
    "surrogates": "\ud800" * 10**6,
    "other digits": "٣" * 10**6,
    "nul": "\0" * 10**6,
    "code": "__import__('os').system('true')#### 9**9**9**9 " * (10**6 // 46),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_megabyte_costs_little_and_scores_nothing(name: str) -> None:
    for text in (HOSTILE[name], "#### " + HOSTILE[name]):
        start = time.process_time()
        assert gsm8k(text, "72")["score"] == 0
        assert tagged_answer(text, "72")["score"] == 0
        assert time.process_time() - start < 1.0


@given(st.text(), st.text())
def test_any_text_has_a_score(response: str, answer: str) -> None:
    for verdict in (gsm8k(response, "72"), gsm8k(response, "72", strict=True), tagged_answer(response, answer)):
        assert set(verdict) == {"score", "acc", "format"}
        assert all(x in (0.0, 1.0) for x in verdict.values())


@given(st.integers(-(10**12), 10**12))
def test_any_integer_equals_itself_with_separators(number: int) -> None:
    assert gsm8k(f"#### {number:,}", str(number))["score"] == 1
