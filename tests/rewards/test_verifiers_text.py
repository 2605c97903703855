"""Numbers, choices, texts, forms and tables."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlprims.rewards import verifiers
from rlprims.rewards.verifiers import (
    by_source,
    exact,
    f1,
    json_schema,
    multiple_choice,
    numeric,
    response_format,
)


@pytest.mark.parametrize(
    ("response", "gold", "bounds", "score"),
    [
        ("so 3.14", "3.14159", {"absolute": 0.002}, 1),
        ("so 3.14", "3.14159", {"absolute": 0.001}, 0),
        ("so 314", "314.1", {"relative": 1e-3}, 1),
        ("so 313", "314.1", {"relative": 1e-3}, 0),
        ("-99", "-100", {"relative": 0.01}, 1),
        ("1.5e-3", "0.0015", {}, 1),
        ("6.02E23", "602e21", {}, 1),
        ("first 5, then 6", "5", {}, 0),
        (r"\boxed{5} and 6", "5", {}, 1),
        ("<answer>5</answer> and 6", "5", {"tag": "answer"}, 1),
        ("5", "5", {"tag": "answer"}, 0),
        ("none", "5", {}, 0),
        ("$1,234.50", "1234.5", {}, 1),
        ("0.1", "0.1", {}, 1),
        ("1e999", "1", {}, 0),
        ("", "5", {}, 0),
    ],
)
def test_numbers_within_bounds(response: str, gold: str, bounds: dict[str, float], score: float) -> None:
    assert numeric(response, gold, **bounds)["score"] == score  # type: ignore[arg-type]


def test_numbers_that_are_none() -> None:
    with pytest.raises(ValueError, match="expected a number"):
        numeric("5", "five")
    with pytest.raises(ValueError, match="expected bounds of at least 0"):
        numeric("5", "5", absolute=-1)
    assert numeric("5", 5)["score"] == 1


@pytest.mark.parametrize(
    "response",
    [
        "B", "b", "(B)", "B.", "**B**", "Answer: B", "Answer: (B) heat", "answer: b", "The answer is B.",
        "The answer is (B), not A.", "A is tempting. But the answer is B", r"\boxed{B}", r"\boxed{\text{B}}",
        "<answer>B</answer>", "<answer> (b) </answer>", "<answer>B: heat rises</answer>", "The final answer is: **B**",
        "A or B?\nAnswer: B) it rises", r"\boxed{A} <answer>B</answer>", "The answer is A? No, the answer is B.",
    ],
)  # fmt: skip
def test_a_choice(response: str) -> None:
    assert multiple_choice(response, "B") == {"score": 1.0, "acc": 1.0, "format": 1.0}
    assert multiple_choice(response, "(A)") == {"score": 0.0, "acc": 0.0, "format": 1.0}


@pytest.mark.parametrize(
    "response", ["", "F", "The answer is a banana", "I don't know", "ABC", "The answer is BA", "x B", "Answer: Because"]
)
def test_no_choice(response: str) -> None:
    assert multiple_choice(response, "B") == {"score": 0.0, "acc": 0.0, "format": 0.0}


@pytest.mark.parametrize("gold", ["AB", "", "F"])
def test_an_answer_that_is_no_choice(gold: str) -> None:
    with pytest.raises(ValueError, match="expected one of the choices"):
        multiple_choice("A", gold)


def test_multiple_choice_of_other_letters() -> None:
    assert multiple_choice("The answer is J", "J", choices="ABCDEFGHIJ")["score"] == 1
    with pytest.raises(ValueError, match="expected one of the choices"):
        multiple_choice("A", "F")


@pytest.mark.parametrize(
    ("response", "gold", "options", "score"),
    [
        ("Paris", "Paris", {}, 1),
        (" Paris\n", "Paris", {}, 1),
        ("paris", "Paris", {}, 0),
        ("paris", "Paris", {"normalized": True}, 1),
        ("The  U.S.A.", "usa", {"normalized": True}, 1),
        ("theatre", "atre", {"normalized": True}, 0),
        ("b", ["a", "b"], {}, 1),
        ("c", ["a", "b"], {}, 0),
        ("I say <answer>b</answer>", "b", {"tag": "answer"}, 1),
        ("b", "b", {"tag": "answer"}, 0),
    ],
)
def test_texts(response: str, gold: str | list[str], options: dict[str, bool], score: float) -> None:
    assert exact(response, gold, **options)["score"] == score  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "golds", "score", "em"),
    [
        ("Eiffel Tower", "the eiffel tower", 1.0, 1.0),
        ("tower", ["eiffel tower"], 2 / 3, 0.0),
        ("tower tower", ["eiffel tower"], 0.5, 0.0),
        ("big tower", ["x", "tower"], 2 / 3, 0.0),
        ("nothing", ["tower"], 0.0, 0.0),
        ("", ["tower"], 0.0, 0.0),
        ("the", [""], 1.0, 1.0),
    ],
)
def test_f1(said: str, golds: str | list[str], score: float, em: float) -> None:
    got = f1(f"<answer>{said}</answer>", golds)
    assert got == {"score": pytest.approx(score), "em": em, "acc": em, "format": 1.0}
    assert f1(said, golds, tag=None)["score"] == pytest.approx(score)
    assert f1(said, golds)["score"] == 0


def test_golds_of_another_kind() -> None:
    for gold in ([], [1], True):
        with pytest.raises(ValueError, match="a text or a list of at least one text"):
            exact("1", gold)  # type: ignore[arg-type]


def test_golds_that_are_numbers() -> None:
    assert [exact("5", 5)["score"], exact("5.0", 5)["score"], f1("<answer>5</answer>", 5)["score"]] == [1.0, 0.0, 1.0]
    assert verifiers.tagged_answer("<answer>2.5</answer>", 2.5)["score"] == 1.0
    assert verifiers.gsm8k("#### 1,234", 1234)["score"] == 1.0


THINK = r"<think>.*</think>\s*<answer>.*</answer>"


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1),
        ("<think></think><answer></answer>", 1),
        ("<answer>4</answer>", 0),
        ("so <think>a</think><answer>4</answer>", 0),
        ("", 0),
    ],
)
def test_form(response: str, score: float) -> None:
    pytest.importorskip("regex")
    assert response_format(response, pattern=THINK) == {"score": score, "format": score}


def test_a_form_that_would_be_searched_for_years() -> None:
    pytest.importorskip("regex")
    with pytest.raises(TimeoutError):
        response_format("a" * 60 + "b", pattern="(a|aa)+", seconds=0.1)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("response", "score", "form"),
    [
        ('{"name": "Ann", "age": 3}', 1, 1),
        ('Here:\n```json\n{"name": "Ann"}\n```\nas asked', 1, 1),
        ('{"age": 3}', 0, 1),
        ('{"name": "Ann", "age": -3}', 0, 1),
        ('{"name": "Ann", "more": 1}', 0, 1),
        ("{'name': 'Ann'}", 0, 0),
        ('{"name": "Ann"', 0, 0),
        ('{"name": NaN}', 0, 0),
        ("[" * 10**5, 0, 0),
        ("[" * 200 + "]" * 200, 0, 0),
        ("9" * 10**5, 0, 0),
        ("", 0, 0),
    ],
)
def test_json(response: str, score: float, form: float) -> None:
    pytest.importorskip("jsonschema")
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        assert json_schema(response, schema) == {"score": score, "acc": score, "format": form}


def test_schemas_fetch_nothing_and_are_checked() -> None:
    pytest.importorskip("jsonschema")
    with pytest.raises(ValueError, match="not a JSON schema"):
        json_schema("{}", {"type": 5})
    with pytest.raises(Exception, match=r"127\.0\.0\.1:9/schema"):
        json_schema("{}", {"$ref": "http://127.0.0.1:9/schema"})
    assert json_schema("<out>[1]</out>", {"type": "array"}, tag="out")["score"] == 1


@pytest.mark.parametrize(
    ("source", "response", "answer"),
    [
        ("openai/gsm8k", "#### 72", "72"),
        ("HuggingFaceH4/MATH-500", r"\boxed{72}", "72"),
        ("math_dapo", "Answer: 72", "72"),
        ("aime2024", r"\boxed{072}", "72"),
        ("numina_olympiads", r"\boxed{72}", "72"),
        ("searchR1_nq", "<answer>The Tower</answer>", {"target": ["tower"]}),
        ("searchR1_nq", "<answer>The Tower</answer>", ["tower"]),
    ],
)
def test_the_table(source: str, response: str, answer: object) -> None:
    assert by_source(response, answer, source)["score"] == 1


def test_ones_own_table_goes_first() -> None:
    table = {"openai/gsm8k": exact, "mine/*": "rlprims.rewards.verifiers.exact"}
    assert by_source("#### 72", "72", "openai/gsm8k", table=table)["score"] == 0
    assert by_source("72", "72", "mine/sums", table=table)["score"] == 1
    assert by_source(r"\boxed{72}", "72", "aime2025", table=table)["score"] == 1
    with pytest.raises(ValueError, match="no verifier for data_source='other'"):
        by_source("72", "72", "other", table=table)
    with pytest.raises(ValueError, match=r"cannot import 'no\.such'"):
        by_source("72", "72", "x", table={"x": "no.such"})


HOSTILE = {
    "digits": "1" * 10**6,
    "braces": r"\boxed{" * (10**6 // 7),
    "open braces": r"\boxed{" + "{" * 10**6,
    "backslashes": "\\" * 10**6,
    "answers": "Answer: " * (10**6 // 8),
    "answer lines": "Answer:\n" * (10**6 // 8),
    "tags": "<answer>" * (10**6 // 8) + "</answer>",
    "brackets": "[" * 10**6,
    "fences": "```" * (10**6 // 3),
    "choices": "(A " * (10**6 // 3),
    "spaces": " " * 10**6,
    "surrogates": "\ud800" * 10**6,
    "nul": "\0" * 10**6,
    "exponents": "9e999999999 " * (10**6 // 12),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_megabyte_costs_little_and_scores_nothing(name: str) -> None:
    import time

    text = HOSTILE[name]
    start = time.process_time()
    assert numeric(text, "72")["score"] == 0
    assert multiple_choice(text, "B")["score"] == 0
    assert exact(text, "72", normalized=True)["score"] == 0
    assert f1(text, "72", tag=None)["score"] == 0
    assert verifiers.math(text, "72")["score"] == 0
    assert time.process_time() - start < 15.0


@given(st.text(), st.text(min_size=1))
def test_any_text_has_a_score(response: str, answer: str) -> None:
    for verdict in (
        exact(response, answer),
        f1(response, answer),
        multiple_choice(response, "A"),
        numeric(response, 5),
    ):
        assert all(0.0 <= x <= 1.0 for x in verdict.values())


@pytest.mark.parametrize(
    ("response", "gold", "score"),
    [
        ("#### 3/4", "0.75", 1), ("#### 3/4", "3", 0), ("#### 7 or 8", "7", 0), ("#### 7, 8", "7", 0),
        ("#### 7-8", "7", 0),
        ("#### −7", "-7", 1), ("#### −7", "7", 0), ("so it is −7", "-7", 1), ("#### 2 million", "2000000", 1),
        ("#### 2 million", "2", 0), ("#### 7 + x", "7", 0), ("#### 7 clips. She had 9.", "7", 1), ("####\n7", "7", 1),
        ("#### 7\n#### or 8?", "7", 0), ("#### 7, because 14/2 = 7", "7", 1), ("about 3/4", "4", 0),
        ("about 3/4", "3/4", 1),
        ("#### 7^2", "7", 0), ("#### 3/0", "3", 0), ("#### 7!", "7", 0),
        ("#### 7\n14 / 2 = 7", "7", 1),
    ],
)  # fmt: skip
def test_one_number_is_an_answer(response: str, gold: str, score: float) -> None:
    assert verifiers.gsm8k(response, gold)["score"] == score


@pytest.mark.parametrize(
    ("response", "gold", "score"),
    [
        (r"\boxed{4.5 \times 10^{33}}", "4.5e33", 1), (r"\boxed{4.5 \times 10^{33}}", "33", 0),
        ("it is 4.5 × 10^3", "4500", 1),
        (r"\boxed{7 or 8}", "8", 0), (r"\boxed{7, 8}", "8", 0), (r"\boxed{\frac{3}{4}}", "0.75", 1),
        (r"\boxed{−2}", "-2", 1),
        (r"4.5 \times 10^{33}", 4.5e33, 1), (r"\boxed{2\text{ million}}", "2e6", 1),
    ],
)  # fmt: skip
def test_numbers_in_scientific_notation_and_fractions(response: str, gold: str, score: float) -> None:
    assert numeric(response, gold)["score"] == score


@pytest.mark.parametrize(
    "response",
    [
        "The answer is A or B", "Answer: B, C", "Answer: (B) (C)", "<answer>A/B</answer>", r"\boxed{A, B}",
        "Answer: B. No, C",
        "Answer: B and C", "The answer is (B) or (C).", r"\boxed{B C}",
    ],
)  # fmt: skip
def test_two_letters_choose_nothing(response: str) -> None:
    assert [multiple_choice(response, gold)["score"] for gold in "ABC"] == [0, 0, 0]


@pytest.mark.parametrize(
    "response", ["The answer is (B), not A.", "Answer: B) A cat", "Answer: B. B it is", "Answer: (B), not (A)"]
)
def test_a_letter_that_is_denied_is_no_choice(response: str) -> None:
    assert [multiple_choice(response, gold)["score"] for gold in "AB"] == [0, 1]


@pytest.mark.parametrize(
    ("source", "gold"),
    [("gsm8k", "forty two"), ("gsm8k", "#### 7 or 8"), ("gpqa", "heat"), ("numbers", "seven"), ("numbers", r"\frac{")],
)
def test_answers_that_cannot_be_read_raise_when_the_data_is_read(source: str, gold: str) -> None:
    with pytest.raises(ValueError, match="answer="):
        verifiers.check_answer(by_source, gold, source, {"table": {"numbers": numeric}})


@pytest.mark.parametrize(("response", "score"), [("so it is 7", 1.0), ("so it is 4", 0.0), ("3 + 4 = 7, or 8", 0.0)])
def test_numeric_reads_a_whole_gsm8k_solution_as_the_answer(response: str, score: float) -> None:
    assert numeric(response, "She has 3 and buys 4 <<3+4=7>>, so 3 + 4 = 7.\n#### 7")["score"] == score
