"""Comparison of a response's final expression with the answer, as mathematics."""

import re
from functools import lru_cache
from typing import Any

from rlprims.rewards.verifiers._latex import plain, spelled, words_unwrapped
from rlprims.rewards.verifiers._numbers import plain_number
from rlprims.rewards.verifiers._tags import answer_line, boxed, depth, final_answer_phrase
from rlprims.rewards.verifiers._units import BARE, NUMBERS, SCALES, symbol, unit

_LONGEST, _DEEPEST = 1000, 8
_CHOICE = re.compile(r"\s*\(?([A-J])(?:\)[.:]?|[.:])\s*(\S.*)", re.DOTALL)
_BECAUSE = re.compile(r"[,;.]?\s+\(?(?:because|since)\b(.*)", re.DOTALL | re.IGNORECASE)
_COUNTED = re.compile(r"([^⟦]*[\d}])\s*⟦([a-z]{4,})⟧")
_RETRACTED = re.compile(
    r"\b(?:or|and|not|no|except|but|maybe|perhaps|wrong|is|are|false|actually|instead|either|neither|unless|[A-J])\b",
    re.ASCII,
)


def math(response: str, answer: str | float | list[str], *, final_phrase: bool = False) -> dict[str, float]:
    r"""1 if the response's final expression is equivalent to the answer: 1/2 and \frac12, sets, matrices.

    The final expression is the content of the last closed ``\boxed{...}``, else the rest of the last ``Answer:`` line
    (DAPO's form), else, with ``final_phrase``, the text after "The final answer is" (Minerva). Without any of these the
    score is 0. The answer is an expression, or a solution with a box.

    Equal texts and equal numbers are compared directly, all other expressions by sympy. It has no limits and would
    compute ``10^{10^{10}}``. Therefore call the verifier in a :class:`rlprims.rewards.pool.Pool`, which limits its time
    and memory. Unless it is the answer's text, an expression with 1,000 characters or 8 nested brackets is wrong.

    The comparison is exact: a decimal is a rational number, and 1/3 is not 0.333. Values without an exact form are
    different if they differ in their first thousand digits. Text that is not understood is never left out: the response
    is then wrong, unless it is the answer's text. The documentation has a table of the readings.

    A letter outside of words is a variable, not a unit: 6m is not 6, but ``6\\text{ m}`` is. Units are compared if both
    sides have some. Each side of an equation must equal the answer: ``6=5`` is not 5. ``a \\approx b`` is a if b is a
    rounded, else it is wrong.

    Raises:
        ValueError: the answer cannot be parsed; neither 0 nor 1 would be a correct score.

    >>> math(r"so it is $\boxed{\frac{3}{4}}$.", r"\dfrac{3}{4}")
    {'score': 1.0, 'acc': 1.0, 'format': 1.0}
    """
    candidate = boxed(response)
    candidate = candidate if candidate is not None else answer_line(response)
    if candidate is None and final_phrase:
        candidate = final_answer_phrase(response)
    if candidate is None:
        return {"score": 0.0, "acc": 0.0, "format": 0.0}
    is_correct = _equal(_gold(answer), candidate)
    return {"score": float(is_correct), "acc": float(is_correct), "format": 1.0}


def check_expression(answer: Any) -> None:
    """Check that :func:`math` can compare responses with the answer.

    Raises:
        ValueError: it cannot.
    """
    if plain_number(_plain(gold := _gold(answer))) is None:
        _read_gold(gold)


def _gold(answer: Any) -> str:
    if isinstance(answer, list) and len(answer) == 1:  # OlympiadBench
        answer = answer[0]
    if not isinstance(answer, str | int | float):
        raise ValueError(f"expected one expression as the answer, got {answer!r}; use a text")
    text = str(answer)
    inner = boxed(text)
    gold = inner if inner is not None else text
    if not gold.strip():
        raise ValueError("answer is empty, expected an expression")
    return gold


def _equal(gold: str, candidate: str) -> bool:
    if gold == candidate:
        return True
    candidate = _BECAUSE.sub(_without_reason, candidate) if "ecause" in candidate or "ince" in candidate else candidate
    if len(candidate) > _LONGEST or depth(candidate) > _DEEPEST or not candidate.strip():
        return bool(candidate.strip()) and _plain.__wrapped__(gold) == _plain.__wrapped__(candidate)
    plain_gold, plain_candidate = _plain(gold), _plain(candidate)
    if plain_gold == plain_candidate:
        return True
    expected_number, number = plain_number(plain_gold), plain_number(plain_candidate)
    if expected_number is not None and number is not None:
        return expected_number == number
    return _same_choice(gold, candidate) or _means(gold, candidate)


_plain = lru_cache(maxsize=1024)(plain)  # a group has one answer, and few different responses


def _without_reason(found: re.Match[str]) -> str:
    return found.group() if _RETRACTED.search(words_unwrapped(found.group(1)).casefold()) else ""


def _same_choice(gold: str, candidate: str) -> bool:
    """A choice with its text: (B) 12 is B if that is the answer, and else 12."""
    (letter, text), (found_letter, found) = _choice(gold), _choice(candidate)
    if letter is not None and found_letter is not None:
        return letter == found_letter and (text is None or found is None or _means(text, found))
    if letter is None and found is not None:
        return _means(gold, found)
    return False


def _choice(text: str) -> tuple[str | None, str | None]:
    """The letter of a choice, and its text."""
    unwrapped = words_unwrapped(text).replace("$", "").replace("*", "").strip()
    if re.fullmatch(r"\([A-J]\)\.?|[A-J]\)?\.?", unwrapped):
        return unwrapped.strip("(). "), None
    found = _CHOICE.fullmatch(unwrapped)
    if not found or _RETRACTED.search(found.group(2)):
        return None, None
    return found.group(1), found.group(2)


def _means(gold: str, candidate: str) -> bool:
    from rlprims.rewards.verifiers import _grammar
    from rlprims.rewards.verifiers._same import same

    expected = _read_gold(gold)
    if expected is None:
        return False
    for thousands in (True, False) if "," in candidate else (True,):
        try:
            if same(expected, _grammar.read(candidate, thousands=thousands)):
                return True
        except (ValueError, TypeError, AttributeError, ArithmeticError, NotImplementedError):
            continue  # it has no meaning, or none that can be compared with the answer
    return False


@lru_cache(maxsize=1024)  # all responses of a group have the same answer
def _read_gold(text: str) -> Any:
    """The value of the answer; None if it is a text, to which only the same text is equal."""
    from rlprims.rewards.verifiers import _grammar
    from rlprims.rewards.verifiers._values import Malformed, Unreadable

    words = re.findall(r"[a-z]+", words_unwrapped(text).lower())
    if words and all(word in NUMBERS or word in SCALES for word in words) and not re.search(r"\d", text):
        raise ValueError(f"answer={text!r} is a number in words: write it in digits")
    if text.count("{") - text.count(r"\{") != text.count("}") - text.count(r"\}"):
        raise ValueError(f"answer={text!r} cannot be parsed as mathematics: its braces are not closed")
    if re.fullmatch(r"[\sA-Za-z]{3,}", words_unwrapped(text)):
        return None
    try:
        thing = _COUNTED.fullmatch(spelled(text))
        if thing and thing.group(2) not in BARE and unit(thing.group(2)) is None:  # a word of the data, so a thing
            return _grammar.read(thing.group(1)) * symbol(thing.group(2))
        return _grammar.read(text.rstrip(" ,;"))
    except Malformed as error:
        raise ValueError(f"answer={text!r} cannot be parsed as mathematics: it ends too early") from error
    except Unreadable:
        return None
