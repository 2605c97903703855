"""A response as JSON that a schema allows."""

import json
from collections.abc import Mapping
from typing import Any

from rlprims.rewards.verifiers._tags import depth, fenced, tagged

_DEEPEST = 100


def json_schema(response: str, answer: Mapping[str, Any] | str, *, tag: str | None = None) -> dict[str, float]:
    """1 if the response is JSON that the answer, a JSON schema, allows; ``format`` is 1 if it is JSON at all.

    Read is what the last ``<tag>...</tag>`` holds if a tag is named, else the last fenced block if there is one, else
    the whole response. NaN and Infinity are not JSON. Needs ``jsonschema`` (extra ``rewards``).

    Raises:
        ValueError: the answer is no schema.

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
        raise ValueError(f"answer is no JSON schema: {error.message}") from None
    try:
        value = _loads(tagged(response, tag) if tag is not None else fenced(response) or response)
    except ValueError:
        return {"score": 0.0, "acc": 0.0, "format": 0.0}
    is_correct = kind(schema, registry=Registry()).is_valid(value)  # an empty registry: nothing is fetched
    return {"score": float(is_correct), "acc": float(is_correct), "format": 1.0}


def _loads(text: str | None) -> Any:
    if text is None or depth(text) > _DEEPEST:
        raise ValueError("no JSON, or too deep")
    return json.loads(text, parse_constant=_refuse)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
