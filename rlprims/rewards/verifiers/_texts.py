"""Tests of a response as text: exact match, F1, a pattern, a JSON schema."""

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlprims import _json
from rlprims.rewards.verifiers._tags import depth, fenced, tagged

_DROPPED = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_DEEPEST = 100


def exact(
    response: str, answer: str | float | Sequence[str], *, tag: str | None = None, normalized: bool = False
) -> dict[str, float]:
    """1 if the response is the answer, or one of several, up to surrounding space.

    ``tag``: compare the text in the last ``<tag>...</tag>`` instead of the whole response. ``normalized``: ignore case,
    punctuation, articles and repeated space, as SQuAD does.

    >>> exact("The Eiffel Tower!", "eiffel tower", normalized=True)["score"]
    1.0
    """
    found, golds = _read(response, answer, tag)
    clean = _normalized if normalized else str.strip
    is_correct = found is not None and clean(found) in {clean(gold) for gold in golds}
    return {"score": float(is_correct), "acc": float(is_correct), "format": float(found is not None)}


def _normalized(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_DROPPED)).split())


def _read(response: str, answer: str | float | Sequence[str], tag: str | None) -> tuple[str | None, list[str]]:
    """The answer in the response, None if there is none, and the expected answers."""
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    golds = [answer] if isinstance(answer, str) else list(answer) if isinstance(answer, Iterable) else []
    if not golds or not all(isinstance(gold, str) for gold in golds):
        raise ValueError(f"answer={answer!r}, expected a text or a list of at least one text")
    return (tagged(response, tag) if tag is not None else response), golds


def f1(response: str, answer: str | float | Sequence[str], *, tag: str | None = "answer") -> dict[str, float]:
    """The best F1 of normalized words over the answers (SQuAD); ``em`` is the normalized exact match, and ``acc`` too.

    Words count as often as they occur. ``tag``: only the text in the last ``<tag>...</tag>`` is used; without such a
    tag the score is 0. For Search-R1's reward, which is the exact match, use :func:`exact`.

    >>> f1("<answer>the tower of Eiffel</answer>", ["Eiffel Tower", "Tour Eiffel"])
    {'score': 0.8, 'em': 0.0, 'acc': 0.0, 'format': 1.0}
    """
    found, golds = _read(response, answer, tag)
    words = _normalized(found or "").split()
    best = max((_f1(words, _normalized(gold).split()) for gold in golds), default=0.0) if found is not None else 0.0
    em = float(found is not None and _normalized(found) in {_normalized(gold) for gold in golds})
    return {"score": best, "em": em, "acc": em, "format": float(found is not None)}


def _f1(found: list[str], gold: list[str]) -> float:
    if not found or not gold:
        return float(found == gold)
    common = sum((Counter(found) & Counter(gold)).values())
    return 2 * common / (len(found) + len(gold))


def tagged_answer(response: str, answer: str | float, *, tag: str = "answer") -> dict[str, float]:
    """1 if the text inside the last ``<tag>...</tag>`` is the answer, up to surrounding space, else 0.

    >>> tagged_answer("<think>2+2=4</think><answer>4</answer>", "4")
    {'score': 1.0, 'acc': 1.0, 'format': 1.0}
    """
    return exact(response, str(answer), tag=tag)


def response_format(response: str, answer: Any = None, *, pattern: str, seconds: float = 1.0) -> dict[str, float]:
    """1 if the regular expression matches the whole response; the answer is not used.

    ``.`` matches line breaks too. The search stops after ``seconds``, because some patterns take exponential time on
    some texts. Needs the package ``regex`` (extra ``rewards``), whose syntax extends that of ``re``.

    Raises:
        TimeoutError: the search took longer.

    >>> response_format("<think>hm</think><answer>4</answer>", pattern="<think>.*</think>\\\\s*<answer>.*</answer>")
    {'score': 1.0, 'format': 1.0}
    """
    import regex

    found = regex.compile(pattern, regex.DOTALL).fullmatch(response, timeout=seconds) is not None
    return {"score": float(found), "format": float(found)}


def json_schema(response: str, answer: Mapping[str, Any] | str, *, tag: str | None = None) -> dict[str, float]:
    """1 if the response is JSON that is valid under the answer, a JSON schema; ``format`` is 1 if it is JSON.

    With ``tag`` the text in the last ``<tag>...</tag>`` is used, else the last fenced block if there is one, else the
    whole response. NaN and Infinity are not JSON. Needs ``jsonschema`` (extra ``rewards``).

    Raises:
        ValueError: the answer is not a schema.

    >>> json_schema('```json\\n{"n": 4}\\n```', {"type": "object", "required": ["n"]})["score"]
    1.0
    """
    import jsonschema
    from referencing import Registry

    schema = json.loads(answer) if isinstance(answer, str) else answer
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"answer is not a JSON schema: {error.message}") from None
    try:
        value = _loads(tagged(response, tag) if tag is not None else fenced(response) or response)
    except ValueError:
        return {"score": 0.0, "acc": 0.0, "format": 0.0}
    is_valid = kind(schema, registry=Registry()).is_valid(value)  # an empty registry: no schema is downloaded
    return {"score": float(is_valid), "acc": float(is_valid), "format": 1.0}


def _loads(text: str | None) -> Any:
    if text is None or depth(text) > _DEEPEST:
        raise ValueError("no JSON, or too deep")
    return _json.loads(text, constants=False)
