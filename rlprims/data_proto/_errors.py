"""The errors of the container. All are ``ValueError``.

They are also ``AssertionError``, because trainers that use verl's container catch that.
"""

from collections.abc import Iterable, Mapping
from typing import Any


class BatchError(ValueError, AssertionError):
    """Wrong data or a wrong call. The message has the name, the value, what was expected, and the fix."""


class MissingField(BatchError, KeyError):
    """No field has this name. The message lists the fields that exist."""

    # KeyError would print the message in quotes, with its line breaks escaped.
    __str__ = Exception.__str__


class RowIndexError(BatchError, IndexError):
    """No row has this index. An ``IndexError``, so that a ``for`` loop over rows ends."""


def names(keys: Iterable[Any]) -> str:
    return "[" + ", ".join(str(key) for key in keys) + "]"


def listing(tensors: Mapping[str, Any] | None, arrays: Mapping[str, Any], meta: Mapping[Any, Any]) -> str:
    """The existing fields by part, for the end of a message."""
    return (
        f"fields: batch {names(tensors.keys() if tensors is not None else ())}, "
        f"non_tensor_batch {names(arrays)}, meta_info {names(meta)}"
    )
