"""The cover of pairs that the tables of settings use."""

from itertools import product

from tests.pairwise import cover, pairs_of

SETTINGS = {"a": (0, 1, 2), "b": ("x", "y"), "c": (False, True), "d": (None, 1.5, 2.5)}


def test_every_allowed_pair_meets_and_no_other():
    def allowed(part):
        return not (part.get("a") == 2 and part.get("c")) and not (part.get("b") == "y" and part.get("d") == 2.5)

    whole = [dict(zip(SETTINGS, values, strict=True)) for values in product(*SETTINGS.values())]
    possible = set().union(*(pairs_of(row) for row in whole if allowed(row)))
    rows = cover(SETTINGS, allowed)
    assert all(allowed(row) and list(row) == list(SETTINGS) for row in rows)
    assert set().union(*map(pairs_of, rows)) == possible
    assert 9 <= len(rows) <= 12
    assert rows == cover(SETTINGS, allowed)
