"""The verifier that belongs to a row's ``data_source``."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from rlprims.rewards.verifiers._code import code_asserts, code_stdin
from rlprims.rewards.verifiers._exact import exact
from rlprims.rewards.verifiers._gsm8k import gsm8k
from rlprims.rewards.verifiers._imported import imported
from rlprims.rewards.verifiers._math import math


def _search(response: str, answer: Any) -> dict[str, float]:
    golds = answer.get("target", answer) if isinstance(answer, Mapping) else answer
    return exact(response, golds, tag="answer", normalized=True)


SOURCES: dict[str, Callable[..., Any] | str] = {
    "openai/gsm8k": gsm8k,
    "gsm8k": gsm8k,
    "lighteval/MATH*": math,
    "DigitalLearningGmbH/MATH-lighteval": math,
    "HuggingFaceH4/MATH-500": math,
    "math*": math,
    "aime*": math,
    "numina_*": math,
    "hiyouga/geometry3k": math,
    "openai/openai_humaneval": code_asserts,
    "mbpp": code_asserts,
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), code_stdin),
    "searchR1_*": _search,
}
"""``data_source`` to verifier. A name may have ``*`` in it; a whole name goes first, then the order counts."""


def by_source(
    response: str, answer: Any, data_source: str, *, table: Mapping[str, Callable[..., Any] | str] | None = None
) -> Any:
    """What the verifier of the row's ``data_source`` returns.

    ``table`` goes before :data:`SOURCES`; its values are functions or their import paths, so a function of your own
    needs no registration. Verifiers that want options are functions of your own, one line each.

    Raises:
        ValueError: no verifier for the source.

    >>> by_source("#### 72", "72", "openai/gsm8k")["score"]
    1.0
    >>> by_source("72", "72", "mine/sums", table={"mine/*": "rlprims.rewards.verifiers.exact"})["score"]
    1.0
    """
    for known in (table or {}, SOURCES):
        if data_source in known:
            return _load(known[data_source])(response, answer)
        for pattern, verifier in known.items():
            if fnmatchcase(data_source, pattern):
                return _load(verifier)(response, answer)
    raise ValueError(f"no verifier for data_source={data_source!r}: give table={{{data_source!r}: function}}")


def _load(verifier: Callable[..., Any] | str) -> Callable[..., Any]:
    return imported(verifier) if isinstance(verifier, str) else verifier
