"""What a worker raised, as the one line that the user reads."""

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

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
    from ray.exceptions import RayTaskError

    from rlprims.execution.ray._reasons import cause_of, traceback_of

    with pytest.raises(Exception) as raised:  # noqa: PT011
        fails()
    text = "".join(traceback.format_exception(raised.value))
    error = RayTaskError("build", text, raised.value, "ray::RolloutWorker.build", 1, "127.0.0.1")
    assert cause_of(error.as_instanceof_cause()) == told
    assert "\x1b" not in traceback_of(error)
    assert "test_execution_reasons.py" in traceback_of(error)


def test_a_long_cause_is_cut() -> None:
    from ray.exceptions import RayTaskError

    from rlprims.execution.ray._reasons import cause_of

    error = RuntimeError("word " * 5000)
    text = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f()\nRuntimeError: {error}\n'
    told = cause_of(RayTaskError("build", text, error, "ray::RolloutWorker.build", 1, "127.0.0.1"))
    assert told.startswith("RuntimeError: word word")
    assert len(told) < 1100
