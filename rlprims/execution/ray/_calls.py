"""Calls of workers: where a method runs, its result, and its error as one line."""

import inspect
import re
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import wraps
from typing import Any, Literal, TypeAlias, TypeVar

import ray
from pydantic import ValidationError
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rlprims.data_proto import DataProto
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
        super().__init__(line, traceback, is_refusal)  # the arguments by which it is sent, with its attributes
        self.call: DataProto | None = None
        self.line, self.traceback, self.is_refusal = line, traceback, is_refusal

    @classmethod
    def from_error(cls, error: BaseException) -> "Failure":
        if isinstance(error, cls):
            return error
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


To: TypeAlias = Literal["everywhere", "first", "split"] | Callable[..., Sequence[tuple[Any, ...]]]


@dataclass(frozen=True)
class dispatch:  # a decorator
    """Decorates a method of a worker: which workers of a group run it, with what, and what comes back.

    Args:
        to: ``everywhere``: every worker gets the same arguments; the result is the list of theirs. ``first``: rank 0
            alone. ``split``: the rows of the first argument, a DataProto, are divided, balanced by the tokens of
            ``attention_mask``; Tensors or DataProtos that come back are joined, rows in their original order. A
            function: ``to(parts, *args)`` returns a tuple of arguments for each part. Keywords go to all as they are.
        collect: a function of the list of the workers' results, which makes the result.
        columns: of a split batch, those that are sent; ``tensors``: all but those of objects.
        together: rows of a split batch with equal ids in this column, such as ``group_ids``, go to one worker.
        share_prompts: rows with the same prompt do if that saves tokens: a packed forward pass computes it once.

    Raises:
        ValueError: an unknown ``to``, or an argument that it does not use.
    """

    to: To
    _: KW_ONLY
    collect: Callable[[list[Any]], Any] | None = None
    columns: Collection[str] | Literal["tensors", "all"] = "all"
    together: str = "trajectory_ids"
    share_prompts: bool = False

    def __post_init__(self) -> None:
        if not callable(self.to) and self.to not in ("everywhere", "first", "split"):
            raise ValueError(f"dispatch: expected everywhere, first, split or a function, got {self.to!r}")
        if self.to != "split" and (self.columns, self.together, self.share_prompts) != ("all", "trajectory_ids", False):
            raise ValueError("dispatch: columns, together and share_prompts are of 'split': leave them out")

    def __call__(self, method: Method) -> Method:
        return marked(method, self)  # type: ignore[no-any-return]


def marked(method: Any, how: dispatch, of: Callable[[Any], Any] = lambda worker: worker) -> Any:
    """The method with its dispatch, of the worker or of what it holds. Its errors become a :class:`Failure`."""

    @wraps(method)
    def plain(worker: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(of(worker), *args, **kwargs)
        except Exception as error:
            raise _with_call(Failure.from_error(error), method, args, kwargs) from None

    @wraps(method)
    async def awaited(worker: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await method(of(worker), *args, **kwargs)
        except Exception as error:
            raise _with_call(Failure.from_error(error), method, args, kwargs) from None

    called: Any = awaited if inspect.iscoroutinefunction(method) else plain
    called.dispatch = how
    return called


def _with_call(failure: Failure, method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Failure:
    """The failure with the call's arguments, if the first is a batch; of a large batch no rows."""
    if failure.call is None and args and isinstance(args[0], DataProto):
        is_small = args[0].batch is None or args[0].batch.bytes() <= 2**29  # Ray sends no error of 2 GB
        others = dict(zip([*inspect.signature(method).parameters][2:], args[1:], strict=False), **kwargs)
        about = {"method": method.__name__, "error": failure.line, "rows": len(args[0]), "arguments": others}
        failure.call = args[0][: None if is_small else 0]
        failure.call.meta_info["failed_call"] = about
    return failure


def fetch(ref: Any, who: str, timeout: float) -> Any:
    """Wait for the result of one worker. An error is raised again with the name of the worker."""
    done, _ = wait([ref], timeout, who)
    if not done:
        raise WorkerLost(f"{who} did not answer within {timeout:g} s")
    try:
        return ray.get(ref, timeout=min(max(1.0, timeout), 1e6))  # Ray takes no infinity
    except RayTaskError as error:  # without a Failure the arguments could not be sent, or the answer
        cause = Failure.from_error(error.cause)
        raised = (WorkerRefused if cause.is_refusal else WorkerError)(f"{who}: {cause.line}")
        raised.call = cause.call
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
