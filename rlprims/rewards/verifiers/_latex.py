r"""One spelling for mathematics in LaTeX, Unicode or plain text: the form that :mod:`._grammar` reads.

Words, of ``\text{...}`` or bare, become ``⟦word⟧``; a row's end in a matrix becomes a line break; ``\$`` becomes ``§``.
"""

import re
import unicodedata
from itertools import groupby

from rlprims.rewards.verifiers._units import BARE

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("−–—", "-"), **dict.fromkeys("·⋅∙", r"\cdot "), **dict.fromkeys("÷∕⁄", "/"),
        **dict.fromkeys("≤⩽", r"\le "), **dict.fromkeys("≥⩾", r"\ge "), **dict.fromkeys("′’‘", "'"), "″": "''",
        "×": r"\times ", "≠": r"\ne ", "≈": r"\approx ", "∞": r"\infty ", "°": r"^\circ ", "√": r"\sqrt ",
        "∅": r"\emptyset ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "∓": r"\mp ", "∠": r"\angle ",
        "、": ",", "。": ".", "ℝ": r"\mathbb R", "⟨": r"\langle ", "⟩": r"\rangle ", "【": "[", "】": "]",
        **{letter: rf"\{unicodedata.name(letter).split()[-1].lower()} " for letter in "αβγδεζηθκλμνξπρστφχψω"},
    }
)  # fmt: skip
_REWRITTEN = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\s+", " "),
        (r"\\\\(?:\[\d*\w*\])?|\\cr\b", "\n"),
        (r"\\!", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?", ""),
        (r"\\[,;:> ]|\\(?:q?quad|enspace|thinspace|displaystyle|textstyle)(?![A-Za-z])|~", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"(?:\bUS)?\\\$|\bUS\$", "§"),
        (r"\\[()\[\]]", ""),
        (r"\\(?:degree|deg)(?![A-Za-z])", r"^\\circ "),
        (r"\^\s*\{\s*\\circ\s*\}", r"^\\circ "),
        (r"\\%", "%"),
        (r"(?<=\d)\{,\}(?=\d{3}(?!\d))", ","),
        (r"(?<=\d)\{,\}(?=\d)", "."),
        (r"\\begin\{(?:[pbB]|small)?matrix\}|\\begin\{array\}\{[clr|]*\}", r"\\matrix{"),
        (r"\\begin\{cases\}", r"\\cases{"),
        (r"\\end\{(?:[pbB]?matrix|smallmatrix|array|cases)\}", "}"),
        (r"(?:\d\u0305)+", lambda found: rf"\overline{{{found.group().replace(chr(0x305), '')}}}"),
        (r"(\d)\u0307", r"\\dot{\1}"),
        (r"\\sqrt *(\d+(?:\.\d+)?)(?![\d{])", r"\\sqrt{\1}"),
        (r"\\(?:varnothing|emptyset)(?![A-Za-z])", r"\\{\\}"),
        (r"\\(?:lbrace|rbrace)(?![A-Za-z])", lambda found: r"\{" if "lb" in found.group() else r"\}"),
        (r"(?<![\d.,/])(\d{1,3})((?: \d{3})+)(?![\d/])", lambda found: found.group().replace(" ", "")),
        (r"(?<![\d.,])(\d+) +(\d+) *(?:/|(?<=\d)\s*∕) *(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    )
]
_WORDS = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|mbox|hbox|math(?:rm|bf|it|sf)|operatorname\*?|boldsymbol|bm)\s*\{((?:[^{}\\]|\\.)*)\}"
)
_WORD = re.compile(r"[A-Za-z]+")
_RUN = re.compile(r"(?<![\\A-Za-z⟦])[A-Za-z]{2,}(?![A-Za-z⟧])")
_FUNCTION = re.compile("sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|arccot|sinh|cosh|tanh|ln|log|lg|exp|sqrt|pi|infty")
_SPACING = re.compile(r"\\[,;:! ]|\\q?quad\b|~|\s+")
_BETWEEN_DIGITS = re.compile(rf"(?<=\d)(?:{_SPACING.pattern})+(?=\d)|(?<=\d,)(?:{_SPACING.pattern})+(?=\d{{3}}(?!\d))")
_SAME = (
    *((r"\dfrac", r"\frac"), (r"\tfrac", r"\frac"), (r"\left", ""), (r"\right", ""), (r"\$", ""), ("$", "")),
    *((r"\(", ""), (r"\)", ""), (r"\degree", r"^\circ"), ("°", r"^\circ"), (r"^{\circ}", r"^\circ"), ("×", r"\times")),
    *(("−", "-"), ("≈", r"\approx")),
)
_LAST_DOT = re.compile(r"(?<!\.)\.$")
_CLOCK = re.compile(r"(\d{1,2})(?::(\d\d))?([ap])\.?m\.?", re.IGNORECASE)


def words_unwrapped(text: str) -> str:
    r"""The text without the commands around words, such as ``\text``."""
    return _WORDS.sub(r"\1", text)


def plain(text: str) -> str:
    """The text without spaces and without the most frequent differences of spelling. 3 p.m. and 3:00 PM are one."""
    for other, one in _SAME:
        text = text.replace(other, one)
    text = _SPACING.sub("", _BETWEEN_DIGITS.sub("|", words_unwrapped(text)))
    text = _LAST_DOT.sub("", text)
    if clock := _CLOCK.fullmatch(text):
        hour, minute, half = clock.groups()
        return f"{int(hour)}:{minute or '00'}{half.lower()}m"
    return text.casefold() if len(text) > 2 and text.isalpha() and text[1:].islower() else text


def spelled(text: str) -> str:
    """The text in the one spelling that the grammar reads."""
    text = "".join(_ascii(text)).translate(_CHARACTERS) if not text.isascii() else text
    for pattern, new in _REWRITTEN:
        text = pattern.sub(new, text)
    text = text.replace("$", "§" if text.count("$") == 1 and re.search(r"\$\s*[\d.]", text) else "")
    text = _RUN.sub(_bare, _WORDS.sub(_marked, text))
    return _LAST_DOT.sub("", text.strip()).strip()


def _ascii(text: str) -> list[str]:
    """Superscripts, subscripts and fractions of Unicode as LaTeX, and full-width characters as ordinary ones."""
    parts = []
    for kind, run in groupby(text, key=lambda character: unicodedata.decomposition(character).partition(">")[0]):
        characters = "".join(run)
        if kind in ("<super", "<sub"):
            inner = unicodedata.normalize("NFKC", characters).replace("−", "-")
            parts.append(f"{'^' if kind == '<super' else '_'}{{{inner}}}")
        elif kind == "<fraction":
            fractions = (unicodedata.normalize("NFKC", character).partition("⁄") for character in characters)
            parts += [rf"\frac{{{a}}}{{{b}}}" for a, _, b in fractions]
        else:
            parts.append(unicodedata.normalize("NFKC", characters) if kind == "<wide" else characters)
    return parts


def _marked(found: re.Match[str]) -> str:
    words = re.sub(r"\\.", " ", found.group(1))
    if _FUNCTION.fullmatch(words.strip()) and "text" not in found.group()[:5]:
        return rf"\{words.strip()} "
    return " " + _WORD.sub(lambda word: f"⟦{word.group()}⟧", words) + " "


def _bare(found: re.Match[str]) -> str:
    """A run of letters: a function, a word, or else variables side by side. Unknown long runs are words."""
    run = found.group()
    if _FUNCTION.fullmatch(run):
        return rf"\{run} "
    return f"⟦{run}⟧" if run.lower() in BARE or (len(run) > 3 and not run.isupper()) else run
