"""The choice of a verifier by the ``data_source`` of a row."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from rlprims._json import beside
from rlprims.rewards._columns import imported
from rlprims.rewards.verifiers._code import check_run, code_asserts, code_stdin
from rlprims.rewards.verifiers._code_data import read_cases, read_tests
from rlprims.rewards.verifiers._math import check_expression, math
from rlprims.rewards.verifiers._multiple_choice import multiple_choice
from rlprims.rewards.verifiers._numeric import gsm8k, numeric
from rlprims.rewards.verifiers._texts import exact


def _search(response: str, answer: Any) -> dict[str, float]:
    golds = answer.get("target", answer) if isinstance(answer, Mapping) else answer
    return exact(response, golds, tag="answer", normalized=True)


def _evalplus(response: str, answer: Any) -> dict[str, float]:
    return code_asserts(response, answer, packages=_PACKAGES)


_PACKAGES = ("numpy",)  # the tests of HumanEval+ and MBPP+ import it

_VERIFIERS = (gsm8k, math, multiple_choice, code_asserts, _evalplus, code_stdin, _search)
_NAMES = beside(__file__, "_sources.json")
SOURCES: dict[str, Callable[..., Any] | str] = {
    source: verifier for verifier in _VERIFIERS for source in _NAMES[verifier.__name__.strip("_")]
}
"""``data_source`` to verifier: the data sets' names on the hub, and their common short names. A name may contain ``*``.
An exact name is tried first, then patterns in this order, then patterns without regard to case."""


def by_source(
    response: str, answer: Any, data_source: str, *, table: Mapping[str, Callable[..., Any] | str] | None = None
) -> Any:
    """The result of the verifier for the row's ``data_source``.

    ``table`` is searched before :data:`SOURCES`. Its values are functions or their import paths, so your functions need
    no registration. To give options to a verifier, write a function that calls it.

    Raises:
        ValueError: no verifier for the source; the message lists similar names.

    >>> by_source("#### 72", "72", "openai/gsm8k")["score"]
    1.0
    >>> by_source("72", "72", "mine/sums", table={"mine/*": "rlprims.rewards.verifiers.exact"})["score"]
    1.0
    """
    return _verifier_of(data_source, table)(response, answer)


def check_answer(
    verifier: Callable[..., Any], answer: Any, data_source: str, options: Mapping[str, Any] | None = None
) -> None:
    """Check that the verifier can test the answer. Call it when data are read, before sampling starts.

    Raises:
        ValueError: no verifier for the data source; an answer that cannot be read; cases or tests that cannot be run.
    """
    options = options or {}
    if verifier is by_source:
        check_answer(_verifier_of(data_source, options.get("table")), answer, data_source)
    elif verifier is code_stdin:
        read_cases(answer, options.get("max_cases"))
        if (run := options.get("run")) is not None:
            check_run(run)
    elif verifier in (code_asserts, _evalplus):
        read_tests(answer, _PACKAGES if verifier is _evalplus else options.get("packages", ()))
    elif verifier is math:
        check_expression(answer)
    elif verifier in (gsm8k, numeric, multiple_choice):  # they read the answer before the response
        verifier("", answer, **{name: value for name, value in options.items() if name in ("choices", "tag")})


def _verifier_of(source: str, table: Mapping[str, Callable[..., Any] | str] | None) -> Callable[..., Any]:
    for known in (table or {}, SOURCES):
        if source in known:
            return _load(known[source])
        for pattern, verifier in known.items():
            if fnmatchcase(source, pattern):
                return _load(verifier)
    for pattern, verifier in SOURCES.items():
        if fnmatchcase(source.lower(), pattern.lower()):
            return _load(verifier)
    similar = _similar(source, table)
    raise ValueError(f"no verifier for data_source={source!r}{similar}: give table={{{source!r}: function}}")


def _similar(source: str, table: Mapping[str, Any] | None) -> str:
    names = {name.lower(): name for name in [*SOURCES, *(table or {})]}
    short = {name.rpartition("/")[2]: shown for name, shown in names.items()}
    source = source.lower()
    found = get_close_matches(source, names, n=3) or get_close_matches(source.rpartition("/")[2], short, n=3)
    shown = dict.fromkeys((names | short)[name] for name in found)
    return f"; similar names are {', '.join(map(repr, shown))}" if shown else "; verifiers.SOURCES lists all"


def _load(verifier: Callable[..., Any] | str) -> Callable[..., Any]:
    return imported(verifier) if isinstance(verifier, str) else verifier
