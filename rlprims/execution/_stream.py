"""A stream of prompts for an execution that samples whole batches."""

from collections.abc import Callable
from itertools import accumulate, count
from typing import Self

from rlprims.data_proto import DataProto


class BatchStream:
    """:class:`rlprims.execution.Stream` of a sampler of whole batches: the next one is all that was submitted."""

    def __init__(self, generate: Callable[[DataProto], DataProto], *, versions: bool = False) -> None:
        self.generate = generate
        self.versions = versions
        self._numbers = count()
        self._submitted: dict[int, DataProto] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._submitted.clear()

    def submit(self, prompts: DataProto) -> int:
        number = next(self._numbers)
        self._submitted[number] = prompts
        return number

    def take(self, timeout: float | None = None) -> dict[int, DataProto]:
        if not self._submitted:
            raise ValueError("expected a part that was submitted and not taken, got none")
        submitted, self._submitted = self._submitted, {}
        rows = self.generate(DataProto.concat(list(submitted.values())))
        if self.versions:  # a batch has one
            rows["versions"] = rows["weights_version"][:, None].expand_as(rows["responses"]).clone()
        ends = accumulate(map(len, submitted.values()))
        return {
            number: rows[end - len(part) : end] for (number, part), end in zip(submitted.items(), ends, strict=True)
        }
