"""What became of one row: its numbers, or why there are none. The one place that calls a verifier."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

_LONGEST_DETAIL = 500


class Failure(NamedTuple):
    """Why a row has no score: ``cause`` is counted, ``detail`` is for a reader."""

    cause: str
    detail: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.detail}" if self.detail else self.cause


Outcome: TypeAlias = dict[str, float] | Failure
"""Numbers by name, ``score`` among them and finite; or a failure."""


def call(verifier: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]) -> Outcome:
    """The verifier's outcome on one row. Whatever it raises costs that row only; an interrupt passes."""
    try:
        return read(verifier(*arguments, **options))
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # some libraries' timeouts are no Exception
        return raised(error)


def raised(error: BaseException) -> Failure:
    return Failure(f"raised {type(error).__name__}", str(error)[:_LONGEST_DETAIL])


def read(result: Any) -> Outcome:
    """A number, or a mapping with ``score``; of a mapping, what is no number is left out, such as a parsed answer."""
    numbers = result if isinstance(result, (dict, Mapping)) else {"score": result}
    if "score" not in numbers:
        return Failure("returned no score", f"only {sorted(map(str, numbers))}"[:_LONGEST_DETAIL])
    values = {str(name): value if type(value) is float else _number(value) for name, value in numbers.items()}
    score = values["score"]
    if score is None:
        kind = type(numbers["score"]).__name__
        return Failure(f"returned {'None' if kind == 'NoneType' else kind}", repr(numbers["score"])[:_LONGEST_DETAIL])
    if not math.isfinite(score):
        return Failure(f"returned {score}", "")
    return {name: value for name, value in values.items() if value is not None}


def columns_of(verifier: Callable[..., Any]) -> list[str]:
    """The data columns that it names after the response and the answer; those without a default must be there."""
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [p.name for p in inspect.signature(verifier).parameters.values() if p.kind is positional][2:]


def plain(value: Any) -> Any:
    """What JSON cannot hold as it is: numpy's and torch's numbers and arrays."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
