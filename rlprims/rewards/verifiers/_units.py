"""Words after a number: units, counted things, and words that multiply."""

import re
from functools import cache
from typing import Any

_UNITS = """
m meter metre|cm centimeter centimetre|mm millimeter millimetre|km kilometer kilometre|nm nanometer|μm micrometer
in inch inches|ft foot feet|yd yard|mi mile|g gram|kg kilogram kilo|mg milligram|lb lbs pound|oz ounce|ton tonne
L l liter litre|mL ml milliliter millilitre|gal gallon|qt quart|pt pint|cup|tablespoon|teaspoon
s sec second|min minute|h hr hrs hour|day|week|month|year yr|decade|century centuries|ms millisecond
deg degree|rad radian|arcminute|unit|mph|N newton|J joule|kJ kilojoule|W watt|kW kilowatt|V volt|Hz hertz|Pa pascal
kelvin|celsius|fahrenheit|mol mole|acre|hectare|knot|bit|byte|rpm|kmh kph|calorie|eV|Ω ohm
$ § dollar usd bucks|cent|€ euro eur|£ gbp|¥ yen yuan rmb cny|₹ rupee inr|penny pennies pence|nickel|dime
person people|man men|woman women|child children|vertex vertices|leaf leaves|sheep|fish|mouse mice|box boxes
bus buses|class classes|glass glasses|match matches|way|choice|possibility possibilities|guess guesses
"""
_THINGS = """
boy girl student teacher friend worker player member team book page pencil pen apple orange banana egg cookie cake
candy marble ball coin stamp ticket card toy sticker car train truck bike ship boat house home room floor door window
chair table tree flower plant bird dog cat cow horse animal rabbit duck chicken bottle bag basket bucket bowl plate
piece slice point game race goal vote combination permutation arrangement outcome solution number integer digit
value divisor side edge face angle diagonal triangle circle line segment step move turn trip word
letter part item object element subset function path sequence committee guest customer passenger employee family clip
cupcake muffin donut doughnut pizza sandwich burger bead button block brick tile stone rock shell seed packet pack jar
can carton crate roll sheet shirt sock shoe hat dress bracelet necklace ring lemon peach pear grape cherry strawberry
potato tomato carrot onion pumpkin melon song movie show photo picture message call question problem test exam lesson
night meal lap kid adult patient nurse doctor soldier farmer fan spectator kitten puppy balloon gift letter
"""
SCALES = {
    "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
    "dozens": 12, "lakh": 10**5, "crore": 10**7,
}  # fmt: skip
POWERS = {"squared": 2, "cubed": 3}
PREFIXES = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_NUMBERS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety half halves third thirds quarters times minus
"""
_OTHERS = "cm km mm kg ft lb oz hr yd mph or and percent per not base if for is infinity"
NUMBERS = set(_NUMBERS.split())
_NAMES = {
    name: names.split()[0] for row in _UNITS.strip().splitlines() for names in row.split("|") for name in names.split()
} | {name: name for name in _THINGS.split()}
BARE = {name for name in _NAMES if len(name) > 2 and name.isalpha()}
BARE |= {*SCALES, *POWERS, *PREFIXES, *NUMBERS, *_OTHERS.split()}
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
