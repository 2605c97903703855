"""Numbers and LaTeX commands of :mod:`._grammar`, read by its ``Reader``: fractions, roots, functions, matrices."""

import re
from typing import Any

from rlprims.rewards.verifiers._units import symbol
from rlprims.rewards.verifiers._values import Group, Name, divided, reals, scalar, times

_SCIENTIFIC = re.compile(r"(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![\w.])")
_REPEATING = re.compile(
    r"(\d*)\.(\d*)(?:\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))|\((\d+)\)"
    r"|\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?)(?:\\l?dots|\.\.\.)?"
)
_ELLIPSIS = re.compile(r"(\d*)\.(\d+)\s*(?:\.\.\.|…|\\[lc]?dots\b)")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?")
_NUMBER = re.compile(r"\d+\.\d+|\d+(?:\.(?!\d|\w))?|\.\d+")
_BASE = re.compile(r"\s*_\s*(?:\{\s*\(?\s*(?:⟦)?(\w+?)(?:⟧)?\s*\)?\s*\}|(\d+)|⟦(\w+)⟧)|\s*⟦base⟧\s*(\d+)")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_IF = re.compile(r"⟦(?:if|for|when)⟧")
_OTHERWISE = re.compile(r"⟦(?:otherwise|else)⟧")
_NEXT = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|ln|log|lg)|[({]")
_LETTERS = re.compile(
    "(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|lambda|mu|nu|xi|pi|rho|sigma|tau|phi|chi|psi|omega|ell)",
    re.IGNORECASE,
)


def number(reader: Any) -> Any:
    rational = reader.sympy.Rational
    if found := reader.match(_SCIENTIFIC):
        return rational(found.group(1)) * reader.sympy.Integer(10) ** int(found.group(2))
    if found := reader.match(_REPEATING):
        whole, fixed, *blocks = found.groups(default="")
        return _repeating(whole, fixed, "".join(blocks), rational)
    if found := reader.match(_ELLIPSIS):
        whole, digits = found.groups()
        block = re.fullmatch(r"(\d*?)(\d)\2{2,}|(\d*?)(\d{2,}?)\4+", digits) or reader.fail()
        return _repeating(whole, block.group(1) or block.group(3) or "", block.group(2) or block.group(4), rational)
    thousands = reader.thousands and not reader.depth and reader.match(_THOUSANDS)
    found = thousands or reader.match(_NUMBER) or reader.fail()
    digits = found.group().replace(",", "")
    if base := reader.match(_BASE):
        name = next(part for part in base.groups() if part)
        number = _BASES.get(name.lower(), name)
        if str(number) != "10":
            return reader.sympy.Symbol(f"{digits} in base {number}", positive=True)
    return rational(digits.rstrip(".")) if "." in digits else reader.sympy.Integer(digits)


def command(reader: Any) -> Any:
    found = reader.match(_COMMAND) or reader.fail()
    name, sympy = found.group(1), reader.sympy
    if _LETTERS.fullmatch(name):
        return reader.letter(f"\\{name}")
    match name:
        case "frac":
            return divided(reader.argument(), reader.argument())
        case "sqrt":
            index = reader.inside(reader.sum) if reader.take("[") and reader.at else 2
            if index != 2:
                reader.need("]")
            return sympy.root(scalar(reader.argument()), index)
        case "binom" | "dbinom" | "tbinom":
            return sympy.binomial(scalar(reader.argument()), scalar(reader.argument()))
        case "infty":
            return sympy.oo
        case "lfloor" | "lceil":
            value = scalar(reader.inside(reader.sum))
            reader.need(r"\rfloor", r"\rceil")
            return (sympy.floor if name == "lfloor" else sympy.ceiling)(value)
        case "langle":
            value = reader.inside(reader.listing)
            reader.need(r"\rangle")
            return Group("()", value.parts) if isinstance(value, Group) else reader.fail()
        case "mathbb" | "R":
            is_real = name == "R" or reader.take("R", "{R}", "{ R }")
            return reals() if is_real else reader.fail()
        case "matrix" | "cases":
            return _rows(reader, name)
        case "text" | "dots" | "ldots":
            return reader.fail()
    return _function(reader, name)


def _rows(reader: Any, kind: str) -> Any:
    """A matrix, or the lines of a definition by cases."""
    reader.need("{")
    rows = [[]]  # type: list[list[Any]]
    while True:
        reader.match(_IF)
        if reader.take("}"):
            break
        rows[-1].append(reader.inside(lambda: Name("otherwise") if reader.match(_OTHERWISE) else reader.relation()))
        if reader.take("\n"):
            rows.append([])
        elif not reader.take("&", ",") and not reader.match(_IF):
            reader.need("}")
            break
    lines = [tuple(row) for row in rows if row]
    if kind == "cases":
        return Group("cases", tuple(Group("()", row) if len(row) > 1 else row[0] for row in lines))
    return Group("matrix", tuple(Group("row", row) for row in lines))


def _function(reader: Any, name: str) -> Any:
    r"""\sin, \ln and others: of a bracket, or of the product that follows."""
    sympy, exponent, base = reader.sympy, None, None
    names = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot", "ln": "log", "lg": "log"}
    known = {"sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp", "log", *names}
    if name not in known:
        reader.fail()
    while sign := reader.take("^", "_"):
        value = reader.exponent() if sign == "^" else reader.argument()
        exponent, base = (value, base) if sign == "^" else (exponent, value)
    value = scalar(_argument_of_function(reader))
    if name in ("sin", "cos", "tan", "cot", "sec", "csc"):
        value = value.subs(symbol("deg"), sympy.pi / 180)
        name, exponent = (f"arc{name}", None) if exponent == -1 else (name, exponent)
    result = getattr(sympy, names.get(name, name))(value)
    if name == "lg" or base is not None:
        result = result / sympy.log(10 if base is None else scalar(base))
    return result if exponent is None else result**exponent


def _argument_of_function(reader: Any) -> Any:
    reader.skip()
    if reader.text[reader.at : reader.at + 1] in ("(", "{", "["):
        return reader.bracketed() if reader.text[reader.at] != "{" else reader.argument()
    value = reader.signed()
    while reader.starts_factor() and not _NEXT.match(reader.text, reader.at):
        value = times(value, reader.power())
    return value


def _repeating(whole: str, fixed: str, block: str, rational: Any) -> Any:
    head = rational(int(f"{whole}{fixed}" or "0"), 10 ** len(fixed))
    return head + rational(int(block), (10 ** len(block) - 1) * 10 ** len(fixed))
