"""A stream of prompts: the protocol, and the stream of an execution that samples whole batches."""

from collections.abc import Callable
from itertools import accumulate, count
from typing import Protocol, Self

from rlprims.data_proto import DataProto


class Stream(Protocol):
    """Parts of prompts that are sampled independently of each other; the responses of a part come when all have ended.

    Use it in a ``with`` statement; its end stops the requests that still run. Until then ``sync_weights`` waits. With
    ``over_updates`` it does not: the responses continue with the new weights, and ``versions`` (B, T) has the version
    of the weights for each token::

        with execution.stream(sampling, seed=0, prompt_width=64) as stream:
            numbers = [stream.submit(group) for group in groups]
            for number, rows in stream.take().items():
                ...
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def submit(self, prompts: DataProto) -> int:
        """Begin the prompts' responses, and return the number of this part."""
        ...

    def take(self) -> dict[int, DataProto]:
        """Wait until a part is complete; returns all complete parts by their numbers, in rows like ``generate``'s.

        Raises:
            ValueError: all parts that were submitted have been taken.
        """
        ...


class BatchStream:
    """:class:`Stream` for a sampler of whole batches: the next batch is all that was submitted."""

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

    def take(self) -> dict[int, DataProto]:
        if not self._submitted:
            raise ValueError("expected a part that was submitted and not taken, got none")
        submitted, self._submitted = self._submitted, {}
        rows = self.generate(DataProto.concat(list(submitted.values())))
        if self.versions:  # all tokens of a batch have the same version
            rows["versions"] = rows["weights_version"][:, None].expand_as(rows["responses"]).clone()
        ends = accumulate(map(len, submitted.values()))
        return {
            number: rows[end - len(part) : end] for (number, part), end in zip(submitted.items(), ends, strict=True)
        }
