"""Comparison of the letter that a response chooses with the answer."""

import re
import string

from rlprims.rewards.verifiers._tags import answer_line, boxed, tagged


def multiple_choice(response: str, answer: str, *, choices: str = "ABCDE", tag: str = "answer") -> dict[str, float]:
    r"""1 if the response chooses the letter of the answer.

    The choice is the first single letter, as in ``(B)``, ``B.`` or ``**B**``, in the last ``<tag>...</tag>``, else in
    the last ``\boxed{}``, else on the last ``Answer:`` line, else after the last "answer is", else in a response that
    is one letter. A lower-case letter counts only in parentheses or if it is the whole text, because "a" is a word. Two
    letters, as in ``A or B`` or ``A, B``, choose nothing; ``B, not A`` is B.

    Raises:
        ValueError: the answer is not one of the choices.

    >>> multiple_choice("Heat rises, so the answer is (B).", "B")
    {'score': 1.0, 'acc': 1.0, 'format': 1.0}
    """
    gold = answer.strip().strip("().").upper()
    if len(gold) != 1 or gold not in choices:
        raise ValueError(f"answer={answer!r}, expected one of the choices {choices!r}: give the letter, or choices=")
    letter = _choice(_answer_text(response, tag), choices)
    return {"score": float(letter == gold), "acc": float(letter == gold), "format": float(letter is not None)}


def _answer_text(response: str, tag: str) -> str:
    for found in (tagged(response, tag), boxed(response), answer_line(response)):
        if found is not None:
            return found
    at = response.lower().rfind("answer is")
    if at >= 0:
        return response[at + len("answer is") :]
    return response if len(response.strip(string.punctuation + string.whitespace)) == 1 else ""


def _choice(text: str, choices: str) -> str | None:
    either = re.escape(choices.upper() + choices.lower())
    upper = re.escape(choices.upper())
    whole_text = re.fullmatch(rf"\W*(?:\\text\w*\{{)?\W*([{either}])\W*", text) if len(text) < 100 else None
    first = whole_text or re.search(rf"\(([{either}])\)|(?<!\w)([{upper}])(?!['\w])", text)
    if first is None:
        return None
    letter = next(letter for letter in first.groups() if letter).upper()
    others = re.finditer(
        rf"(?:\b(?:or|and|no)\b|[,;/&.])\W*\b([{upper}])(?!['\w])|(?<!not )\(([{either}])\)|\A\W*([{upper}])\W*\Z",
        text[first.end() :],
    )
    return letter if all(letter == one.upper() for other in others for one in other.groups() if one) else None
