"""Words after a number: units, counted things, and words that multiply."""

import re
from functools import cache
from typing import Any

from rlprims._json import beside

_WORDS = beside(__file__, "_units.json")
SCALES = {
    "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
    "dozens": 12, "lakh": 10**5, "crore": 10**7,
}  # fmt: skip
POWERS = {"squared": 2, "cubed": 3}
PREFIXES = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
NUMBERS = {*_WORDS["numbers"]}
_NAMES: dict[str, str] = {name: names.split()[0] for names in _WORDS["units"] for name in names.split()}
_NAMES |= {name: name for name in _WORDS["things"]}
BARE = {name for name in _NAMES if len(name) > 2 and name.isalpha()}
BARE |= {*SCALES, *POWERS, *PREFIXES, *NUMBERS, *_WORDS["others"]}
"""Words that count as words without a command for text around them."""
BARE |= {f"{name}s" for name in BARE if len(name) > 2} | {re.sub("y$", "ies", name) for name in BARE if len(name) > 2}


def unit(word: str) -> str | None:
    """The name of a unit or a counted thing; None for other words."""
    for name in (word, word.lower()) if len(word) > 2 else (word,):
        for one in (name, name.removesuffix("s") if len(name) > 3 else name, re.sub("ies$", "y", name)):
            if one in _NAMES:
                return _NAMES[one]
    return None


@cache
def symbol(name: str) -> Any:
    """The unit as a factor."""
    import sympy

    return sympy.Symbol(f"unit {name}", positive=True)


def units_of(expression: Any) -> set[Any]:
    """The units in an expression."""
    return {one for one in expression.free_symbols if one.name.startswith("unit ")}


def as_letters(expression: Any) -> Any:
    """The expression with variables in the place of units: m for meter, c m for centimeter."""
    import sympy

    letters = {
        one: sympy.Mul(*(sympy.Symbol(letter, real=True) for letter in one.name.removeprefix("unit ")))
        for one in units_of(expression)
    }
    return expression.subs(letters)
