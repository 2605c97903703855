"""Validation of a response by a JSON schema."""

import json
from collections.abc import Mapping
from typing import Any

from rlprims.rewards.verifiers._tags import depth, fenced, tagged

_DEEPEST = 100


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
    return json.loads(text, parse_constant=_refuse)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
