"""Preparation of written expressions for a parser: spelling, words, units, hedges, chains of equations."""

import re
from collections.abc import Iterator

SAME = (
    *((r"\dfrac", r"\frac"), (r"\tfrac", r"\frac"), (r"\left", ""), (r"\right", ""), (r"\$", ""), ("$", "")),
    *((r"\(", ""), (r"\)", ""), (r"\degree", r"^\circ"), ("°", r"^\circ"), (r"^{\circ}", r"^\circ"), ("×", r"\times")),
    *(("−", "-"), ("≈", r"\approx")),
)
_WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}\\]*)\}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LETTER = re.compile(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
_EXPONENT = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![\w.])")
_ENERGY = re.compile(r"(?<![A-Za-z\\])E(?![A-Za-z])")
_HEDGE = re.compile(r"\b(?:maybe|perhaps|possibly|probably|unsure|not|either)\b|\(\s*(?:or|and)\b", re.IGNORECASE)
_NAME = re.compile(
    r"\s*(?!\\(?:pi|infty)\b)(?:[A-Za-z]|\\[A-Za-z]+)(?:_(?:\w|\{\w+\}))?(?:\([A-Za-z](?:,\s*[A-Za-z])*\))?\s*"
)


def words_unwrapped(text: str) -> str:
    """The text without LaTeX commands around words, such as ``\\text``."""
    return _WORDS.sub(r"\1", text)


def is_hedged(text: str) -> bool:
    """Whether the text retracts its answer: words such as maybe or not, ``(or``, or a second number in words."""
    if _HEDGE.search(words_unwrapped(text)):
        return True
    return any(
        any(map(str.isdigit, words.group(1))) and any(map(str.isdigit, text[: words.start()]))
        for words in _WORDS.finditer(text)
    )


def letters(text: str) -> set[str]:
    """The letters of variables: single letters outside of words and commands, except i and e."""
    return set(_LETTER.findall(_COMMAND.sub(" ", _WORDS.sub(" ", text)))) - {"i", "e"}


def unit_letters(text: str) -> set[str]:
    """The letters of units that are written as words."""
    return {character for words in _WORDS.findall(text) for character in words if character.isalpha()}


def for_parser(text: str, units: bool) -> str:
    """Rewrite text that the parser misreads: 4.5e33, E before a sign, degree signs. Without ``units`` drop words."""
    for other, one in SAME[:4] + SAME[6:]:
        text = text.replace(other, one)
    text = _EXPONENT.sub(r"\1 \\times 10^{\2}", text)
    text = _ENERGY.sub(r"\\Xi ", text)
    without_words = _WORDS.sub(lambda words: words.group() if words.group(1).strip() in ("or", "and") else "", text)
    return text if units or not without_words.strip() else without_words


def split_outside(text: str, mark: str) -> list[str]:
    """Split the text at marks that are not inside brackets."""
    parts, depth, start = [], 0, 0
    at = 0
    while at < len(text):
        depth += {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}.get(text[at], 0)
        if depth == 0 and text.startswith(mark, at):
            parts.append(text[start:at])
            at = start = at + len(mark)
        else:
            at += 1
    return [*parts, text[start:]]


def sides(text: str) -> Iterator[str]:
    """The sides of a chain of equations, without a name at its start or end: 5 and 2+3 for x = 5 = 2+3."""
    parts = split_outside(text, "=")
    if len(parts) > 1:
        named = next((at for at in (0, len(parts) - 1) if _NAME.fullmatch(parts[at])), None)
        if named is not None:
            del parts[named]
    yield from parts


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def name_defined(text: str) -> str | None:
    """The name that an equation defines: x for x = 5."""
    parts = split_outside(text, "=")
    for part in (parts[0], parts[-1]) if len(parts) > 1 else ():
        if _NAME.fullmatch(part):
            return part.strip()
    return None


_MARKED = re.compile(r"final answer is:?\s*", re.IGNORECASE)
_ENCLOSED = ((r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("$", "$"))


def final_phrase(text: str) -> str | None:
    r"""The text after the last "the final answer is", up to the end of its formula or of its sentence."""
    marks = [mark.end() for mark in _MARKED.finditer(text)]
    if not marks:
        return None
    rest = text[marks[-1] :].partition("\n")[0]
    for opening, closing in _ENCLOSED:
        if rest.startswith(opening):
            inner, mark, _ = rest[len(opening) :].partition(closing)
            return inner.strip() if mark else None
    return re.split(r"\.(?:\s|$)", rest, maxsplit=1)[0].strip() or None
