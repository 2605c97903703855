"""What a worker raised, as the one line that the user reads."""

import asyncio
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from rlprims.data_proto import DataProto

pytestmark = pytest.mark.ray


@dataclass
class Options:
    share: float = Field(default=0.5, gt=0, le=1)
    size: int = 1

    @model_validator(mode="after")
    def _fits(self) -> "Options":
        if self.size > 9:
            raise ValueError("size: expected at most 9,\ngot more")
        return self


class CannotBeSent(RuntimeError):
    def __reduce__(self) -> str:
        raise TypeError("not by pickle")


def opens_a_file() -> None:
    Path("/nowhere/weights").read_text()


def fails_with(error: Exception) -> Callable[[], None]:
    def fails() -> None:
        raise error

    return fails


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        (fails_with(ValueError("no common block size\n  for 17")), "no common block size for 17"),
        (fails_with(KeyError("head")), "KeyError: 'head'"),
        (fails_with(MemoryError()), "MemoryError"),
        (fails_with(CannotBeSent("of two\nlines")), "CannotBeSent: of two lines"),
        (opens_a_file, "[Errno 2] No such file or directory: '/nowhere/weights'"),
        (
            lambda: Options(share=7, size="a"),  # type: ignore[arg-type]
            "2 validation errors for Options: share: Input should be less than or equal to 1; "
            "size: Input should be a valid integer, unable to parse string as an integer",
        ),
        (
            lambda: Options(size=10),
            "1 validation error for Options: Value error, size: expected at most 9, got more",
        ),
    ],
)
def test_a_cause_is_one_line_without_frames_colours_and_links(fails: Callable[[], None], told: str) -> None:
    from rlprims.execution.ray import dispatch
    from rlprims.execution.ray._calls import Failure

    with pytest.raises(Failure) as raised:
        dispatch("first")(lambda worker: fails())(None)
    failure = pickle.loads(pickle.dumps(raised.value))  # noqa: S301  # as Ray sends it
    assert failure.line == told
    assert failure.is_refusal == (told[:2] in ("no", "2 ", "1 "))  # a ValueError
    is_on_disk = told.startswith("[Errno")  # whose message has path and reason
    assert is_on_disk or "test_execution_reasons.py" in failure.traceback
    assert "\x1b" not in failure.traceback


def test_a_long_cause_is_cut() -> None:
    from rlprims.execution.ray._calls import one_line

    told = one_line(RuntimeError("word " * 5000))
    assert told.startswith("RuntimeError: word word")
    assert len(told) < 1100


def test_an_error_of_a_method_that_awaits_is_data_too() -> None:
    from rlprims.execution.ray import dispatch
    from rlprims.execution.ray._calls import Failure

    @dispatch("first")
    async def fails(worker: None) -> None:
        raise CannotBeSent("of two\nlines")

    with pytest.raises(Failure) as raised:
        asyncio.run(fails(None))
    assert raised.value.line == "CannotBeSent: of two lines"


def test_an_error_brings_the_batch_of_its_call() -> None:
    from rlprims.execution.ray import dispatch
    from rlprims.execution.ray._calls import Failure

    def fails(worker: None, batch: DataProto, size: int, *, plain: bool) -> None:
        raise ValueError(f"{len(batch)} rows")

    rows = DataProto.from_dict({"x": torch.zeros(2, dtype=torch.float64)}, {"lists": [[1], [2, 3]]})
    large = DataProto.from_dict({"x": torch.zeros(2**29, dtype=torch.bool)})
    larger = DataProto.from_dict({"x": torch.zeros(2**29 + 1, dtype=torch.bool)})
    for sent, kept in ((rows, 2), (large, 2**29), (larger, 0)):
        with pytest.raises(Failure) as raised:
            dispatch("first")(dispatch("first")(fails))(None, sent, 3, plain=True)
        call = raised.value.call
        assert call is not None
        assert len(call) == kept
        told = {"method": "fails", "error": f"{len(sent)} rows", "arguments": {"size": 3, "plain": True}}
        assert call["failed_call"] == {**told, "rows": len(sent)}
    with pytest.raises(Failure) as raised:
        dispatch("first")(fails)(None, rows, 3, plain=True)
    failure = pickle.loads(pickle.dumps(raised.value))  # noqa: S301  # as Ray sends it
    assert failure.call["lists"].tolist() == [[1], [2, 3]]
    assert failure.call["failed_call"] == {**told, "error": "2 rows", "rows": 2}


def test_an_error_of_other_calls_brings_none() -> None:
    from rlprims.execution.ray import dispatch
    from rlprims.execution.ray._calls import Failure

    with pytest.raises(Failure) as raised:
        dispatch("everywhere")(lambda worker, size: size / 0)(None, 3)
    assert raised.value.call is None
