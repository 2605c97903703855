"""Reads mathematics in the spelling of :mod:`._latex`. What it does not know is refused, never left out."""

import re
from collections.abc import Callable
from typing import Any, NoReturn

from rlprims.rewards.verifiers import _units
from rlprims.rewards.verifiers._commands import command, number
from rlprims.rewards.verifiers._latex import spelled
from rlprims.rewards.verifiers._values import (
    Group,
    Malformed,
    Name,
    Relation,
    Rounded,
    Unreadable,
    added,
    divided,
    has_units,
    is_number,
    power,
    reals,
    scalar,
    times,
)

_SPACE = re.compile(r"[ ]*")
_SUBSCRIPT = re.compile(r"_\s*(?:\{([^{}]*)\}|(\w))")
_WORD = re.compile(r"⟦(\w+)⟧(?:\.(?=\s*⟦))?")
_RELATION = re.compile(
    r"<=|>=|=<|[<>=≡]|\\(?:leq?|leqslant|geq?|geqslant|lt|gt|neq?|approx|in|equiv|iff|Rightarrow|implies)(?![A-Za-z])|:="
)
_SIGNS = {
    r"\le": "<=", r"\leq": "<=", r"\leqslant": "<=", "=<": "<=", r"\ge": ">=", r"\geq": ">=", r"\geqslant": ">=",
    r"\lt": "<", r"\gt": ">", r"\ne": "!=", r"\neq": "!=", r"\equiv": "≡", ":=": "=",
}  # fmt: skip
_OPERATOR = re.compile(r"\\(?:cup|cap|setminus|backslash|pm|mp|mid|cdot|times|div|rangle|\}|[rv]vert|rfloor|rceil)")
_SEPARATOR = re.compile(r"[,;]\s*(?:⟦(?:or|and|OR)⟧)?|⟦(?:or|and|OR)⟧|\n")
_NAME = re.compile(
    r"(?:m\s*)?\\angle\s*\{?[A-Z]{1,3}\}?|\\(?:triangle|overline|vec|widehat|hat|bar)\s*\{?\s*[A-Za-z]{1,3}\s*\}?"
    r"|\|\s*(?:\\\w+\s*\{)?[A-Z]{2}\}?\s*\||[A-Z]{2,4}|(?:⟦(?!not|wrong|never|if|or|and|per)[A-Za-z]+⟧\s*){1,3}"
    r"|\\?[A-Za-z]+(?:_(?:\w|\{[^{}]*\}))?(?:\^\{?-1\}?|'+)?\s*\([\w,. ]{1,20}\)|[A-Za-z](?:_(?:\w|\{[^{}]*\}))?'+"
)
_WHOLE = re.compile(r"(?:^|[^\^_{\d.])\d+\s*$")
_DECIMAL = re.compile(r"-?\d+(?:\.(\d+))?")
_DEGREES = re.compile(r"(?:\^\s*\\circ|⟦[Dd]egrees?⟧)\s*(?:⟦?([CF])(?:elsius|ahrenheit)?⟧?(?![A-Za-z_]))?")
_SCALED = re.compile(rf"⟦({'|'.join((*_units.SCALES, *_units.POWERS))})s?⟧", re.IGNORECASE)


class _Text:
    """A text that is read from left to right; ``at`` is the place."""

    def __init__(self, text: str, thousands: bool) -> None:
        import sympy

        self.text, self.at, self.thousands, self.depth, self.bar = text, 0, thousands, 0, False
        self.sympy: Any = sympy

    def fail(self) -> NoReturn:
        raise Unreadable(f"at {self.text[self.at : self.at + 20]!r}")

    def end(self) -> NoReturn:
        raise Malformed("the text ends in the middle of an expression")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self.skip()
        found = pattern.match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def skip(self) -> None:
        found = _SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def take(self, *marks: str) -> str | None:
        self.skip()
        for mark in marks:
            if self.text.startswith(mark, self.at):
                end = self.at + len(mark)
                if mark[-1].isalpha() and self.text[end : end + 1].isalpha():
                    continue
                self.at = end
                return mark
        return None

    def need(self, *marks: str) -> str:
        return self.take(*marks) or (self.fail() if self.text[self.at :] else self.end())

    def inside(self, read: Callable[[], Any]) -> Any:
        """Read within brackets, where a comma separates."""
        depth, bar = self.depth, self.bar
        self.depth, self.bar = depth + 1, False
        value = read()
        self.depth, self.bar = depth, bar
        return value


class Reader(_Text):
    """A descent through the grammar, one method for each level."""

    def whole(self) -> Any:
        value = self.listing()
        self.skip()
        return value if self.at == len(self.text) else self.fail()

    def listing(self) -> Any:
        """Values between commas, semicolons, or, and."""
        parts, words = [self.relation()], set()
        while found := self.match(_SEPARATOR):
            words.add("or" if "or" in found.group().lower() else "and")
            parts.append(self.relation())
        if len(parts) == 1:
            return parts[0]
        return Group("or" if words == {"or"} else "list", tuple(parts))

    def relation(self) -> Any:
        sides, signs = [self.side()], []
        while found := self.match(_RELATION):
            signs.append(_SIGNS.get(found.group(), found.group()))
            start = self.at
            sides.append(self.side())
            if signs[-1] == r"\approx":
                decimal = _DECIMAL.fullmatch(self.text[start : self.at].strip())
                sides[-1] = Rounded(sides[-1], len(decimal.group(1) or "") if decimal else None)
        return Relation(tuple(signs), tuple(sides)) if signs else sides[0]

    def side(self) -> Any:
        self.skip()
        name = _NAME.match(self.text, self.at)
        if name:
            after = self.text[name.end() :].lstrip()
            is_last = not after and self.text[: self.at].rstrip().endswith("=")
            if is_last or (_RELATION.match(after) and after[:1] in "=:\\"):
                self.at = name.end()
                return Name("".join(name.group().split()))
        return self.union()

    def union(self) -> Any:
        value = self.ratio()
        while sign := self.take(r"\cup", r"\setminus", r"\backslash", r"\cap"):
            other = self.ratio()
            if sign != r"\cup":
                value = Group(sign, (value, other))
                continue
            parts = [one.parts if isinstance(one, Group) and one.kind == "union" else (one,) for one in (value, other)]
            value = Group("union", parts[0] + parts[1])
        return value

    def ratio(self) -> Any:
        parts = [self.sum()]
        while not self.bar and self.text[self.at : self.at + 2] != ":=" and self.take(":"):
            parts.append(self.sum())
        if len(parts) == 1:
            return parts[0]
        return divided(*parts) if len(parts) == 2 else Group("ratio", tuple(parts))

    def sum(self) -> Any:
        value = self.product()
        while sign := self.take("+", "-", r"\pm"):
            other = self.product()
            if sign == r"\pm":
                value = Group("list", (added(value, other), added(value, times(-1, other))))
            else:
                value = added(value, other if sign == "+" else times(-1, other))
        return value

    def product(self) -> Any:
        if sign := self.take("+", "-", r"\pm", r"\mp"):
            value = self.product()
            if sign in ("+", "-"):
                return value if sign == "+" else times(-1, value)
            return Group("list", (value, times(-1, value)))
        value = self.power()
        while True:
            if self.take(r"\cdot", r"\times", "*"):
                value = times(value, self.signed())
            elif self.take("/", r"\div", "⟦per⟧"):
                value = divided(value, self.signed())
            elif self.starts_factor():
                value = self.beside(value)
            else:
                return value

    def signed(self) -> Any:
        return times(-1, self.power()) if self.take("-") else self.power()

    def beside(self, value: Any) -> Any:
        """A factor without a sign in front: a mixed number, a word after a number, or a product."""
        start = self.at
        after_unit = has_units(value)
        before = self.text[:start].rstrip()[-1]
        is_number_next = self.text[start].isdigit() or self.text[start] == "."
        mixed = self.text.startswith(r"\frac", start) and _WHOLE.search(self.text[:start])
        if is_number_next and (before.isdigit() or before == "}"):
            self.fail()
        factor = self.power()
        if mixed and getattr(value, "is_Integer", False) and getattr(factor, "is_Rational", False):
            return value + factor
        if is_number_next and after_unit and not value.is_Symbol:  # 5 ft 6 in
            while self.starts_factor() and not self.text[self.at].isdigit():
                factor = times(factor, self.power())
            return added(value, factor)
        return times(value, factor)

    def starts_factor(self) -> bool:
        self.skip()
        rest = self.text[self.at :]
        if not rest or _SEPARATOR.match(rest) or _RELATION.match(rest) or rest.startswith("⟦if"):
            return False
        if rest[0] == "|":
            return not self.bar and "|" in rest[1:]
        if rest[0] == "\\":
            return not _OPERATOR.match(rest)
        return rest[0].isalnum() or rest[0] in "({⟦.§€£¥₹%"

    def power(self) -> Any:
        """A value with what stands behind it: exponents, factorials, percent, degrees, primes, squared."""
        value = self.primary()
        while True:
            self.skip()
            if found := self.match(_DEGREES):
                value = times(value, _units.symbol(f"degree {found.group(1)}" if found.group(1) else "deg"))
            elif self.take("^", "**"):
                value = power(value, self.exponent())
            elif self.take("%", "⟦percent⟧", "⟦percents⟧", "⟦Percent⟧"):
                value = times(value, _units.symbol("%"))
            elif self.take("!"):
                value = self.sympy.factorial(scalar(value))
            elif is_number(value) and (mark := self.take("''", "'", r"^\prime")):
                value = value * _units.symbol("deg") / (3600 if mark == "''" else 60)
            elif found := self.match(_SCALED):
                word = found.group(1).lower()
                value = times(value, _units.SCALES[word]) if word in _units.SCALES else value ** _units.POWERS[word]
            else:
                return value

    def exponent(self) -> Any:
        if self.take("-"):
            return times(-1, self.primary())
        return self.primary()

    def primary(self) -> Any:
        self.skip()
        if self.at >= len(self.text):
            self.end()
        character = self.text[self.at]
        if character.isdigit() or character == ".":
            return number(self)
        if character == "{":
            return self.braced()
        if character in "([]":
            return self.bracketed()
        if currency := self.take(*"§€£¥₹"):
            amount = self.power() if self.text[self.at : self.at + 1].strip(" .(").isdigit() else 1
            return times(amount, _units.symbol(_units.unit(currency) or ""))
        if character == "⟦":
            return self.word()
        if self.take(r"\{"):
            return self.braces()
        if self.take("|", r"\lvert", r"\vert"):
            return self.absolute()
        if character == "\\":
            return command(self)
        if character.isalpha():
            self.at += 1
            return self.letter(character)
        return self.fail()

    def letter(self, letter: str) -> Any:
        if found := self.match(_SUBSCRIPT):
            inner = re.sub(r"[⟦⟧\s]", "", found.group(1) or found.group(2))
            return self.sympy.Symbol(f"{letter}_{inner}", real=True)
        constants = {"e": self.sympy.E, "i": self.sympy.I, r"\pi": self.sympy.pi}
        return constants[letter] if letter in constants else self.sympy.Symbol(letter, real=True)

    def word(self) -> Any:
        found = self.match(_WORD) or self.fail()
        word = found.group(1)
        if exponent := _units.PREFIXES.get(word.lower()):
            return self.word() ** exponent
        if name := _units.unit(word):
            return _units.symbol(name)
        if word.lower() == "infinity":
            return self.sympy.oo
        return self.letter(word) if len(word) == 1 else self.fail()

    def braced(self) -> Any:
        """A LaTeX group. Its commas are those of the text around it."""
        self.need("{")
        depth, self.depth = self.depth, 0 if self.depth == 0 else self.depth
        value = self.listing()
        self.depth = depth
        self.need("}")
        return value

    def argument(self) -> Any:
        r"""The argument of a command such as \frac: a group, or one character."""
        self.skip()
        if self.text.startswith("{", self.at):
            return self.braced()
        if self.text[self.at : self.at + 1].isdigit():
            self.at += 1
            return self.sympy.Integer(int(self.text[self.at - 1]))
        return self.primary()

    def bracketed(self) -> Any:
        opening = self.need("(", "[", "]").replace("]", "(")
        value = self.inside(self.listing)
        closing = self.need(")", "]", "[").replace("[", ")")
        if isinstance(value, Group) and value.kind == "list":
            return Group(opening + closing, value.parts)
        return value if (opening, closing) in (("(", ")"), ("[", "]")) else self.fail()

    def braces(self) -> Any:
        """A set by its elements, or by a condition."""
        if self.take(r"\}"):
            return Group("set", ())

        def inner() -> Any:
            self.bar = True
            value = self.listing()
            return (value, self.listing()) if self.take(r"\mid", "|", ":") else (value, None)

        value, condition = self.inside(inner)
        self.need(r"\}")
        if condition is not None:
            if isinstance(value, Relation) and value == Relation((r"\in",), (value.sides[0], reals())):
                value = value.sides[0]
            return condition if isinstance(value, self.sympy.Symbol) else self.fail()
        return Group("set", value.parts if isinstance(value, Group) and value.kind in ("list", "or") else (value,))

    def absolute(self) -> Any:
        def inner() -> Any:
            self.bar = True
            return self.sum()

        value = self.sympy.Abs(scalar(self.inside(inner)))
        self.need("|", r"\rvert", r"\vert")
        return value


def read(text: str, *, thousands: bool = True) -> Any:
    """The value of a text. ``thousands``: a comma before three digits belongs to the number.

    Raises:
        Unreadable: the grammar does not know the text.
    """
    text = spelled(text)
    if r"\mp" in text and r"\pm" in text:
        up, down = text.replace(r"\pm", "+").replace(r"\mp", "-"), text.replace(r"\pm", "-").replace(r"\mp", "+")
        return Group("list", (read(up), read(down)))
    try:
        return Reader(text, thousands).whole()
    except (TypeError, AttributeError, IndexError, ZeroDivisionError, RecursionError) as error:  # it has no meaning
        raise Unreadable(str(error)) from None
