"""Whether two values of :mod:`._grammar` are the same. Exact: no tolerance on what has an exact form."""

from itertools import pairwise
from typing import Any

from rlprims.rewards.verifiers import _units
from rlprims.rewards.verifiers._values import Group, Name, Relation, Rounded, reals

_POINTS = ("17/13", "-23/29", "101/37", "3/11", "-71/19", "43/7", "5/41", "-13/31")
_DIGITS = 1000
"""Values are different if they differ within so many digits, relative to their parts."""
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}


def same(gold: Any, found: Any) -> bool:
    """Whether a response's value is the data's. Units: compared if both have some, else left out."""
    gold, found = _interval(gold), _interval(found)
    if isinstance(gold, Relation) or isinstance(found, Relation):
        return _same_relations(gold, found)
    if isinstance(gold, Group) or isinstance(found, Group):
        return _same_groups(gold, found)
    if isinstance(gold, Name) or isinstance(found, Name):
        return bool(gold == found)
    return _same_quantities(gold, found)


def _same_relations(gold: Any, found: Any) -> bool:
    (name, golds), (found_name, founds) = _equation(gold), _equation(found)
    if not isinstance(gold, Relation | Group | Name) and gold.is_Symbol:  # A = B chooses neither
        return False
    named_alike = name is None or found_name in (None, name)
    if len(golds) == 1 and founds and named_alike and all(same(golds[0], side) for side in founds):
        return True
    if not isinstance(gold, Relation) or not isinstance(found, Relation):
        return False
    return _same_chains(gold, found)


def _equation(value: Any) -> tuple[Any, list[Any]]:
    """The name that an equation defines, and its other sides: x and [5, 2+3] for x = 5 = 2+3."""
    if not isinstance(value, Relation):
        return None, [value]
    signs, sides = set(value.signs), list(value.sides)
    if signs == {"in"} or signs == {r"\in"}:
        return (sides[0], sides[1:]) if _is_name(sides[0]) and len(sides) == 2 else (None, [])
    if signs != {"="}:
        return _rounded(value)
    for at in (0, len(sides) - 1):
        if _is_name(sides[at]):
            return sides[at], sides[:at] + sides[at + 1 :]
    return None, sides


def _rounded(value: Relation) -> tuple[Any, list[Any]]:
    r"""An equation whose last side is a rounded value: x = a \approx b is x = a if b is a, rounded."""
    import sympy

    *signs, last = value.signs
    *sides, decimal = value.sides
    if last != r"\approx" or set(signs) - {"="}:
        return None, []
    if len(sides) == 1 and _is_name(sides[0]):
        return sides[0], [decimal.value]
    exact = sides[-1]
    if decimal.digits is None or isinstance(exact, Group | Relation | Name | Rounded) or exact.free_symbols:
        return None, []
    if not abs(exact - decimal.value) * 2 <= sympy.Rational(1, 10**decimal.digits):
        return None, []
    return _equation(Relation(tuple(signs), tuple(sides))) if signs else (None, sides)


def _is_name(value: Any) -> bool:
    if isinstance(value, Name):
        return True
    if isinstance(value, Group):
        return value.kind == "()" and all(_is_name(part) for part in value.parts)
    return bool(value.is_Symbol) and " " not in value.name


def _same_chains(gold: Relation, found: Relation) -> bool:
    """Equations and inequalities of two sides: the same up to a factor that is not 0, for inequalities positive."""
    sides = (*gold.sides, *found.sides)
    if any(isinstance(side, Group | Name) for side in sides) or len(gold.sides) != 2 or len(found.sides) != 2:
        return gold.signs == found.signs and all(map(same, gold.sides, found.sides))
    (sign,), (found_sign,) = gold.signs, found.signs
    a, b = gold.sides[0] - gold.sides[1], found.sides[0] - found.sides[1]
    if found_sign != sign:
        b, found_sign = -b, _FLIPPED.get(found_sign, found_sign)
    if found_sign != sign or not a.free_symbols or a.free_symbols != b.free_symbols:
        return False
    ratio = (a / b).cancel()
    if not ratio.is_number:
        ratio = ratio.simplify()
    return bool(ratio.is_number and ratio.is_finite and (sign in ("=", "!=") or ratio.is_positive))


def _same_groups(gold: Any, found: Any) -> bool:
    if isinstance(found, Group) and found.kind == "set" and len(found.parts) == 1 and not isinstance(gold, Group):
        return same(gold, found.parts[0])
    if isinstance(gold, Group) and gold.kind == "set" and len(gold.parts) == 1 and not isinstance(found, Group):
        return same(gold.parts[0], found)
    if not isinstance(gold, Group) or not isinstance(found, Group):
        return False
    golds, founds = _vector(_flat(gold)), _vector(_flat(found))
    if golds.kind != founds.kind or len(golds.parts) != len(founds.parts):
        return False
    if golds.kind in ("list", "union", "cases"):
        return _same_in_any_order(golds.parts, founds.parts)
    pairs = zip(golds.parts, founds.parts, strict=True)
    if golds.kind == "ratio":
        return all(same(a * founds.parts[0], b * golds.parts[0]) for a, b in pairs)
    return all(same(a, b) for a, b in pairs)


def _same_in_any_order(golds: tuple[Any, ...], founds: tuple[Any, ...]) -> bool:
    left = list(founds)
    for gold in golds:
        at = next((at for at, found in enumerate(left) if same(gold, found)), None)
        if at is None:
            return False
        del left[at]
    return True


def _flat(value: Group) -> Group:
    """Lists and sets as one kind; lists within lists joined; x = 1 or x = 3 as 1, 3."""
    if value.kind not in ("list", "or", "set"):
        return value
    parts: list[Any] = []
    equations = [_equation(part) for part in value.parts]
    names = {str(name).partition("_")[0] for name, sides in equations if name is not None and len(sides) == 1}
    for part, (name, sides) in zip(value.parts, equations, strict=True):
        if name is not None and len(sides) == 1:
            part = sides[0] if len(names) == 1 else Group("equation", (part,))
        part = _interval(part)
        parts += _flat(part).parts if isinstance(part, Group) and part.kind in ("list", "or") else [part]
    intervals = all(isinstance(part, Group) and part.kind in ("()", "(]", "[)", "[]", "union") for part in parts)
    if intervals and value.kind == "or":
        return Group("union", tuple(one for part in parts for one in (part.parts if part.kind == "union" else (part,))))
    return Group("list", tuple(parts))


def _vector(value: Group) -> Group:
    """A matrix of one column or one row as a tuple."""
    if value.kind != "matrix":
        return value
    if all(len(row.parts) == 1 for row in value.parts):
        return Group("()", tuple(row.parts[0] for row in value.parts))
    return Group("()", value.parts[0].parts) if len(value.parts) == 1 else value


def _interval(value: Any) -> Any:
    r"""Inequalities of one variable as intervals: 1 < x <= 3 as (1, 3], x \ne 2 as two intervals."""
    import sympy

    if isinstance(value, Group) and value.kind == r"\setminus" and all(isinstance(part, Group) for part in value.parts):
        whole, points = value.parts
        if whole == reals() and points.kind == "set":
            return _without(points.parts)
    if isinstance(value, Group) and value.kind in ("list", "or"):
        return _joined(value)
    if not isinstance(value, Relation):
        return value
    at = [i for i, side in enumerate(value.sides) if getattr(side, "is_Symbol", False)]
    others = [side for i, side in enumerate(value.sides) if [i] != at]
    if len(at) != 1 or any(isinstance(side, Group | Name | Rounded) or side.free_symbols for side in others):
        return value
    signs = value.signs
    if signs == ("!=",):
        return _without(tuple(others))
    if set(signs) & {">", ">="}:
        signs = tuple(_FLIPPED.get(sign, sign) for sign in reversed(signs))
        others, at = others[::-1], [len(signs) - at[0]]
    if not set(signs) <= {"<", "<="} or len(others) not in (1, 2) or (len(others) == 2 and at != [1]):
        return value
    low, high = others if len(others) == 2 else (others[0], sympy.oo) if at == [1] else (-sympy.oo, others[0])
    opening = "[" if at == [1] and signs[0] == "<=" else "("
    closing = "]" if signs[-1] == "<=" and at[0] < len(value.sides) - 1 else ")"
    return Group(opening + closing, (low, high))


def _without(points: tuple[Any, ...]) -> Any:
    """The real numbers without some points."""
    import sympy

    if any(isinstance(point, Group | Relation | Name) or not point.is_real for point in points):
        return Group("without", points)
    ends = [-sympy.oo, *sorted(points), sympy.oo]
    return Group("union", tuple(Group("()", pair) for pair in pairwise(ends)))


def _joined(value: Group) -> Any:
    """x > 1 and x < 3 as (1, 3); x < 1 or x > 3 as a union."""
    parts = [_interval(part) for part in value.parts]
    if len(parts) != 2 or not all(isinstance(part, Relation) for part in value.parts):
        return value
    if not all(isinstance(part, Group) and part.kind in ("()", "(]", "[)", "[]") for part in parts):
        return value
    first, second = sorted(parts, key=lambda part: part.parts[0])
    if value.kind == "or" or bool(first.parts[1] < second.parts[0]):
        return Group("union", (first, second))
    if first.parts[0].is_finite or second.parts[1].is_finite or first.parts[1] == second.parts[0]:
        return value
    return Group(second.kind[0] + first.kind[1], (second.parts[0], first.parts[1]))


def _same_quantities(gold: Any, found: Any) -> bool:
    import sympy

    if gold == found:
        return True
    units, found_units = _units.units_of(gold), _units.units_of(found)
    if not units and not found_units:
        return _same_numbers(gold, found)
    if bool(units) != bool(found_units):
        if (gold.free_symbols | found.free_symbols) - units - found_units:  # 6m is 6 m, and not 6
            return _same_numbers(_units.as_letters(gold), _units.as_letters(found))
        return _without_units(gold, found, bool(units))
    if units != found_units and _units.symbol("deg") in units | found_units:
        radian = 180 * _units.symbol("deg") / sympy.pi
        return _same_numbers(*(one.subs(_units.symbol("rad"), radian) for one in (gold, found)))
    return _same_numbers(gold, found)


def _without_units(gold: Any, found: Any, gold_has: bool) -> bool:
    """One side has units. Degrees may be radians with π; 50% may be 50 or 1/2."""
    import sympy

    whole, bare = (gold, found) if gold_has else (found, gold)
    units = _units.units_of(whole)
    number, factor = whole.as_independent(*units, as_Add=False)
    if not factor.is_Mul and not factor.is_Pow and not factor.is_Symbol:
        return False
    if sympy.pi in bare.atoms() and _units.symbol("deg") in units:
        return factor == _units.symbol("deg") and _same_numbers(number * sympy.pi / 180, bare)
    if number == 1 and whole.is_Symbol:
        return False
    if _units.symbol("%") in units and factor != _units.symbol("%"):
        return False
    if factor == _units.symbol("%"):
        return _same_numbers(number, bare) or _same_numbers(number / 100, bare)
    return _same_numbers(number, bare)


def _same_numbers(gold: Any, found: Any) -> bool:
    difference = gold - found
    if difference.is_Rational:
        return bool(difference == 0)
    if difference.expand() == 0:
        return True
    if not difference.free_symbols:
        return _is_zero(difference, {})
    return _vanishes(difference, gold)


def _vanishes(difference: Any, gold: Any) -> bool:
    """Whether an expression is 0 at all points at which the gold is defined (and real, unless it has an i)."""
    import sympy

    symbols = sorted(difference.free_symbols | gold.free_symbols, key=str)
    is_complex, tried = gold.has(sympy.I), 0
    for first in range(len(_POINTS)):
        points = (sympy.Rational(_POINTS[(first + at) % len(_POINTS)]) for at in range(len(symbols)))
        point = dict(zip(symbols, points, strict=True))
        value = gold.evalf(15, subs=point)
        if value.has(sympy.nan, sympy.zoo, sympy.oo) or (not is_complex and abs(sympy.im(value)) > 1e-12):
            continue
        if not _is_zero(difference, point):
            return False
        tried += 1
    return tried >= 3


def _is_zero(difference: Any, point: dict[Any, Any]) -> bool:
    """Whether the value cannot be told from 0 by its first thousand digits."""
    value = difference.evalf(5, subs=point, maxn=_DIGITS)
    if not value.is_number or not value.is_finite:
        return False
    return all(part == 0 or getattr(part, "_prec", 2) == 1 for part in value.as_real_imag())
