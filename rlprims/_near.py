"""The word that helps for a name that is nearly right."""

import sys
from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches
from typing import NoReturn

from rlprims._json import beside

OTHER_WORDS: dict[str, str] = {
    other: ours for ours, others in beside(__file__, "_near.json").items() for other in others
}
"""Names of other libraries, and what they are called here."""


def near(name: str, known: Iterable[str]) -> str | None:
    """The known name that is meant: a common other word, the same but for case and dashes, or a similar one.

    >>> near("PPO_clip", ["clipped_surrogate", "kl"]), near("token-mean", ["token_mean"]), near("x", ["kl"])
    ('clipped_surrogate', 'token_mean', None)
    """
    names, plain = sorted(known), name.lower().replace("-", "_")
    if (meant := OTHER_WORDS.get(plain)) in names:
        return meant
    found = get_close_matches(plain, names, cutoff=0.7)
    first = {each: [a == b for a, b in zip(plain, each, strict=False)] for each in found}
    return max(found, key=lambda each: (SequenceMatcher(None, plain, each).ratio(), first[each]), default=None)


def suggest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    return f"did you mean {meant!r}?" if (meant := near(name, names)) else f"choose from {', '.join(names)}"


def suggest_attributes(module: str, known: Iterable[str]) -> None:
    """Give a module a ``__getattr__`` whose error names the function that is meant.

    If the module's own text had one, type checkers would take every name for right.
    """

    def no_attribute(name: str) -> NoReturn:
        meant = near(name, known)
        text = f"module {module!r} has no attribute {name!r}"
        raise AttributeError(f"{text}: did you mean {meant!r}?" if meant and not name.startswith("_") else text)

    vars(sys.modules[module])["__getattr__"] = no_attribute
