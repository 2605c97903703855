"""Bugs planted in right steps are found by their codes, and each code finds one that no other code reports."""

from collections import Counter

import pytest

from rlprims import audit
from tests.audit.bugs import BUGS, Bug, planted

LONG = "the KL term has no mask"
"""Half a minute, as no formula fits: in the slow lane."""
FAST = [each for number, each in enumerate(BUGS) if each.what not in {LONG, *(before.what for before in BUGS[:number])}]
"""Each bug in one setup; the slow lane has all setups, and before a release three seeds."""
LONE = {each.code: each for each in reversed(FAST)}
"""By code the first bug, which no other code reports."""


def found(each: Bug, seed: int) -> tuple[str, ...]:
    checked = audit.check(planted(each, seed))
    assert not [reason for reason in checked.silent.values() if "size of tensor" in reason]
    return checked.codes


@pytest.mark.parametrize("each", FAST, ids=lambda each: f"{each.code}-{each.what}"[:60])
def test_a_planted_bug_is_found(each: Bug) -> None:
    codes = found(each, 1)
    assert codes == (each.code,) if LONE[each.code] is each else each.code in codes


def test_each_code_has_a_bug() -> None:
    assert LONE.keys() == set(audit.CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [[1], pytest.param([2, 3], marks=pytest.mark.release)], ids=str)
def test_nineteen_of_twenty_bugs_are_found_in_all_setups(seeds: list[int]) -> None:
    results = Counter(each.code in found(each, seed) for each in BUGS for seed in seeds)
    assert results.total() >= 60 * len(seeds)
    assert results[True] >= 0.95 * results.total()
