"""The errors of the container. All are ``ValueError``.

They are ``AssertionError`` too, because that is what the trainers that this container serves were written to catch.
"""

from collections.abc import Iterable, Mapping
from typing import Any


class BatchError(ValueError, AssertionError):
    """Wrong data or a wrong call: says the name, what was got, what is needed, and the fix."""


class MissingField(BatchError, KeyError):
    """No field has this name; the message lists those that exist."""

    # KeyError would show the message in quotes, with its line breaks escaped.
    __str__ = Exception.__str__


class RowIndexError(BatchError, IndexError):
    """No row has this index. An ``IndexError``, so that a ``for`` loop over rows ends."""


def names(keys: Iterable[Any]) -> str:
    return "[" + ", ".join(str(key) for key in keys) + "]"


def listing(tensors: Mapping[str, Any] | None, arrays: Mapping[str, Any], meta: Mapping[Any, Any]) -> str:
    """What exists, by part, to end a message with."""
    return (
        f"fields: batch {names(tensors.keys() if tensors is not None else ())}, "
        f"non_tensor_batch {names(arrays)}, meta_info {names(meta)}"
    )
