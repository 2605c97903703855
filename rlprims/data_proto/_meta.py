"""``meta_info``: how it is copied, and how the parts of several workers become one."""

import copy
from collections.abc import Sequence
from types import NoneType
from typing import Any

from torch import Tensor

from rlprims.data_proto._equality import same
from rlprims.data_proto._errors import BatchError

_IMMUTABLE = frozenset({NoneType, bool, int, float, complex, str, bytes})


def copied(value: Any) -> Any:
    """A copy such that no change to it reaches the original: containers, arrays and tensors at any depth."""
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    if kind is list:
        return [copied(item) for item in value]
    if kind is tuple:
        return tuple(copied(item) for item in value)
    if isinstance(value, Tensor):
        return value.clone()  # deepcopy refuses a tensor in a graph
    try:
        return copy.deepcopy(value)
    except Exception:  # a lock, a socket, a generator: one thing that cannot be two
        return value


def merged(metas: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
    """One ``meta_info`` of several workers.

    ``metrics`` (a dict, or a list of dicts, or None, per worker) becomes a dict of lists, in the order of the workers;
    what only some workers report stays. Every other key must be equal wherever it is present.
    """
    result: dict[Any, Any] = {}
    metrics: list[dict[Any, Any]] = []
    for position, meta in enumerate(metas):
        for key, value in meta.items():
            if key == "metrics":
                metrics.extend(_reports(value, position))
            elif key not in result:
                result[key] = copied(value)
            elif not same(result[key], value):
                raise BatchError(
                    f"concat: meta_info[{key!r}] is {result[key]!r} in an earlier part and {value!r} in part "
                    f"{position}; make them equal, drop the key, or put what each worker measures in "
                    "meta_info['metrics']"
                )
    if metrics:
        result["metrics"] = _collected(metrics)
    return result


def _reports(value: Any, position: int) -> list[dict[Any, Any]]:
    if value is None:
        return []
    reports = value if isinstance(value, list) else [value]
    if not all(isinstance(report, dict) for report in reports):
        raise BatchError(
            f"concat: meta_info['metrics'] of part {position} is {value!r}; it needs a dict of name to value, a "
            "list of such dicts, or None"
        )
    return reports


def _collected(reports: Sequence[dict[Any, Any]]) -> dict[Any, list[Any]]:
    lists: dict[Any, list[Any]] = {}
    for report in reports:
        for name, value in report.items():
            # A list was collected before: joining it keeps concat of concats the same as one concat.
            lists.setdefault(name, []).extend(copied(value) if isinstance(value, list) else [copied(value)])
    return lists
