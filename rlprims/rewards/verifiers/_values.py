"""The values of mathematics that :mod:`._grammar` reads, and arithmetic on them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from rlprims.rewards.verifiers._units import units_of


class Unreadable(ValueError):
    """The text is not mathematics that the grammar knows."""


class Malformed(Unreadable):
    """The text ends in the middle of an expression."""


class Group(NamedTuple):
    """Several values: ``list``, ``set``, ``union``, ``cases`` (in any order), ``ratio``, or ordered in brackets."""

    kind: str
    """One of the above, or the opening and the closing bracket: ``()``, ``[)``."""
    parts: tuple[Any, ...]


class Relation(NamedTuple):
    """Values between signs such as = and <=. A value may be a :class:`Name`."""

    signs: tuple[str, ...]
    sides: tuple[Any, ...]


class Rounded(NamedTuple):
    r"""The side behind \approx, and its number of decimals if it is a decimal."""

    value: Any
    digits: int | None


class Name(NamedTuple):
    """What an equation names, and is no expression: f(x), ∠ABC, the area."""

    text: str


def reals() -> Group:
    """All real numbers, as an interval."""
    import sympy

    return Group("()", (-sympy.oo, sympy.oo))


def scalar(value: Any) -> Any:
    if isinstance(value, Group | Relation | Name):
        raise Unreadable("expected an expression")
    return value


def is_number(value: Any) -> bool:
    return bool(getattr(value, "is_Rational", False))


def has_units(value: Any) -> bool:
    return not isinstance(value, Group | Relation | Name | int) and bool(units_of(value))


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """The function of each value of a list, as of 1 ± 2, or of a matrix."""
    if isinstance(value, Group) and value.kind in ("list", "matrix", "row"):
        return Group(value.kind, tuple(_mapped(part, function) for part in value.parts))
    return function(scalar(value))


def times(a: Any, b: Any) -> Any:
    if isinstance(a, Group):
        a, b = b, a
    return _mapped(b, lambda part: scalar(a) * part)


def added(a: Any, b: Any) -> Any:
    if isinstance(a, Group):
        a, b = b, a
    if isinstance(b, Group) and b.kind != "list":
        raise Unreadable("a sum of a matrix and a number")
    return _mapped(b, lambda part: scalar(a) + part)


def divided(a: Any, b: Any) -> Any:
    return _mapped(a, lambda part: part / scalar(b))


def power(a: Any, b: Any) -> Any:
    return scalar(a) ** scalar(b)
