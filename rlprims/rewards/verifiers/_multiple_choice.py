"""The letter that a response chooses."""

import re
import string

from rlprims.rewards.verifiers._tags import answer_line, boxed, tagged


def multiple_choice(response: str, answer: str, *, choices: str = "ABCDE", tag: str = "answer") -> dict[str, float]:
    r"""1 if the response's choice is the answer's letter.

    The choice is the first letter that stands alone, as in ``(B)``, ``B.`` or ``**B**``, in the last
    ``<tag>...</tag>``, else in the last ``\boxed{}``, else on the last ``Answer:`` line, else after the last "answer
    is", else in a response that is one letter. Lower case counts only if it is in parentheses or
    alone: "a" is a word.

    Raises:
        ValueError: the answer is none of the choices.

    >>> multiple_choice("Heat rises, so the answer is (B).", "B")
    {'score': 1.0, 'acc': 1.0, 'format': 1.0}
    """
    gold = answer.strip().strip("().").upper()
    if len(gold) != 1 or gold not in choices:
        raise ValueError(f"answer={answer!r} is none of the choices {choices!r}: give the letter, or choices=")
    chosen = _choice(_place(response, tag), choices)
    return {"score": float(chosen == gold), "acc": float(chosen == gold), "format": float(chosen is not None)}


def _place(response: str, tag: str) -> str:
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
    alone = re.fullmatch(rf"\W*(?:\\text\w*\{{)?\W*([{either}])\W*", text) if len(text) < 100 else None
    match = alone or re.search(rf"\(([{either}])\)|(?<!\w)([{upper}])(?!['\w])", text)
    return next(letter for letter in match.groups() if letter).upper() if match else None
