"""Calls of workers: where a method runs, its result, and its error as one line."""

import inspect
import re
import traceback
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, Literal, NamedTuple, TypeVar

import ray
from pydantic import ValidationError
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rlprims.execution import ExecutionError
from rlprims.execution.ray._head import wait

Method = TypeVar("Method", bound=Callable[..., Any])

_LONGEST = 1000
"""Characters of a reason. The traceback has the rest."""


class WorkerError(ExecutionError):
    """A worker raised an error. The message has the worker's name and the cause, the note the worker's traceback."""


class WorkerRefused(WorkerError, ValueError):
    """A worker raised a ValueError because of its arguments."""


class WorkerLost(ExecutionError):
    """A worker died, or did not answer in time."""


class Failure(Exception):
    """What a worker raised, as data: so it comes to the driver, also if the error itself cannot be sent."""

    def __init__(self, line: str, traceback: str, is_refusal: bool) -> None:
        super().__init__(line, traceback, is_refusal)  # the arguments by which it is sent
        self.line, self.traceback, self.is_refusal = line, traceback, is_refusal

    @classmethod
    def from_error(cls, error: BaseException) -> "Failure":
        shown = "" if isinstance(error, OSError) else "".join(traceback.format_exception(error))
        return cls(one_line(error), shown, isinstance(error, ValueError))


def one_line(error: BaseException) -> str:
    """The error as one line. ValueError and OSError are not named: their messages suffice."""
    if isinstance(error, ValidationError):
        count = error.error_count()
        found = (": ".join([*filter(None, [".".join(map(str, e["loc"]))]), e["msg"]]) for e in error.errors())
        text = f"{count} validation error{'s' if count > 1 else ''} for {error.title}: {'; '.join(found)}"
    else:
        name = "" if isinstance(error, ValueError | OSError) else type(error).__name__
        text = ": ".join(filter(None, [name, str(error)]))
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


class Dispatch(NamedTuple):
    """Where a method of a worker group runs."""

    where: Literal["everywhere", "first", "split"]
    columns: Collection[str] | Literal["tensors", "all"] = "all"
    by_prompt: bool = False


def everywhere(method: Method) -> Method:
    """Call the method with the same arguments on every rank; the result is the list of the ranks' results."""
    return _marked(method, Dispatch("everywhere"))


def first(method: Method) -> Method:
    """Call the method on rank 0 only."""
    return _marked(method, Dispatch("first"))


def split(
    columns: Collection[str] | Literal["tensors", "all"] = "all", *, by_prompt: bool = False
) -> Callable[[Method], Method]:
    """Split the first argument, a DataProto, by rows, balanced by tokens; a trajectory stays in one part.

    Tensors or DataProtos that the ranks return are joined, with the rows in their original order; other results are a
    list. Only ``columns`` are sent; ``tensors``: all but those of objects. With ``by_prompt`` rows with the same prompt
    go to one rank if that saves tokens, because a packed forward pass computes a prompt once for all its rows.
    """
    return lambda method: _marked(method, Dispatch("split", columns, by_prompt))


def _marked(method: Method, dispatch: Dispatch) -> Method:
    """The method with its dispatch. Its errors become a :class:`Failure`."""

    @wraps(method)
    def plain(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            raise Failure.from_error(error) from None

    @wraps(method)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        try:
            return await method(*args, **kwargs)
        except Exception as error:
            raise Failure.from_error(error) from None

    called: Any = awaited if inspect.iscoroutinefunction(method) else plain
    called.dispatch = dispatch
    return called  # type: ignore[no-any-return]


def fetch(ref: Any, who: str, timeout: float) -> Any:
    """Wait for the result of one worker. An error is raised again with the name of the worker."""
    done, _ = wait([ref], timeout, who)
    if not done:
        raise WorkerLost(f"{who} did not answer within {timeout:g} s")
    try:
        return ray.get(ref, timeout=min(max(1.0, timeout), 1e6))  # Ray takes no infinity
    except RayTaskError as error:  # without a Failure the arguments could not be sent, or the answer
        cause = error.cause if isinstance(error.cause, Failure) else Failure.from_error(error.cause)
        raised = (WorkerRefused if cause.is_refusal else WorkerError)(f"{who}: {cause.line}")
        if cause.traceback:
            raised.add_note(cause.traceback)
        raise raised from None
    except RayActorError as error:
        lost = WorkerLost(f"{who} died ({reason_of(str(error))})")
        lost.add_note(str(error))
        raise lost from None
    except GetTimeoutError:
        raise WorkerLost(f"{who} did not answer within {timeout:g} s") from None


def settled(
    calls: Mapping[int, Any], name: Callable[[int], str], timeout: float
) -> tuple[dict[int, Any], dict[int, WorkerError | WorkerLost]]:
    """Wait for calls of workers, by rank; returns the answers, and the errors of the workers that failed."""
    answers, failures = dict[int, Any](), dict[int, WorkerError | WorkerLost]()
    for rank, ref in calls.items():
        try:
            answers[rank] = fetch(ref, name(rank), timeout)
        except (WorkerError, WorkerLost) as error:
            failures[rank] = error
    return answers, failures


def reason_of(words: str) -> str:
    """What Ray says at the end of its message about the death of an actor, without the advice."""
    last = words.strip().splitlines()[-1].strip()
    if "End of file" in last:  # all that Ray knows of a signal
        return "its process was killed or crashed: out of memory, signal 9, or a fault in native code"
    detail = re.split(r"because |Worker exit detail: |exits unexpectedly\. ", last)[-1]
    return detail[:_LONGEST].rstrip(". ")
