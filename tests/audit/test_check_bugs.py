"""Bugs planted in right steps are found by their codes, and each code finds one that no other code reports."""

from collections import Counter

import pytest

from rlprims import audit
from tests.audit.bugs import BUGS, Bug, planted

FAST = [each for number, each in enumerate(BUGS) if each.what not in {before.what for before in BUGS[:number]}]
"""Each bug in one setup; the slow lane has all setups and three seeds."""


def found(each: Bug, seed: int) -> tuple[str, ...]:
    checked = audit.check(planted(each, seed))
    assert not [reason for reason in checked.silent.values() if "size of tensor" in reason]
    return checked.codes


@pytest.mark.parametrize("each", FAST, ids=lambda each: f"{each.code}-{each.what}"[:60])
def test_a_planted_bug_is_found(each: Bug) -> None:
    assert each.code in found(each, 0)


def test_each_code_alone_finds_some_bug() -> None:
    assert {each.code for each in BUGS} == set(audit.CHECKS)
    lone = {code: next(each for each in BUGS if each.code == code) for code in audit.CHECKS}
    assert {code: found(each, 1) for code, each in lone.items()} == {code: (code,) for code in lone}


@pytest.mark.slow
def test_nineteen_of_twenty_bugs_are_found_in_all_setups() -> None:
    results = Counter(each.code in found(each, seed) for each in BUGS for seed in range(1, 4))
    assert results.total() >= 3 * 60
    assert results[True] >= 0.95 * results.total()
