"""See :class:`DynamicSampling`."""

from collections import Counter
from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

Group = TypeVar("Group")


class SamplingExhausted(RuntimeError):
    """The limit of generation batches was reached before the batch was full; the message says what was seen."""


class DynamicSampling(Generic[Group]):
    """Collects kept groups over generation batches until a training batch is full (DAPO, arXiv:2503.14476, sec. 3.2).

    A group is whatever the caller calls one, whole: after :meth:`take` each has the samples it came with. Groups beyond
    the batch are the surplus and open the next one (verl discards them). Every group that is added ends as taken,
    surplus, or dropped for a reason that is counted.

    Args:
        groups: groups of a training batch.
        max_generation_batches: how many may be added for one training batch; None: no limit.
        at_limit: "error" raises :class:`SamplingExhausted`; "smaller_batch" takes what there is, if there is anything.

    >>> sampling = DynamicSampling(groups=2, max_generation_batches=3)
    >>> sampling.add(["a", "b", "c"], dropped=[None, "all acc = 0", None])
    >>> sampling.full
    True
    >>> sampling.take()
    ['a', 'c']
    """

    def __init__(
        self,
        *,
        groups: int,
        max_generation_batches: int | None = None,
        at_limit: Literal["error", "smaller_batch"] = "error",
    ) -> None:
        if groups < 1 or (max_generation_batches is not None and max_generation_batches < 1):
            raise ValueError(f"groups={groups} and max_generation_batches={max_generation_batches} must be at least 1")
        self.groups = groups
        self.max_generation_batches = max_generation_batches
        self.at_limit = at_limit
        self.surplus: list[Group] = []
        self.generation_batches = 0
        self.sampled = 0
        self.dropped: Counter[str] = Counter()

    @property
    def full(self) -> bool:
        """Whether a training batch can be taken; past the limit it raises or settles for less, as ``at_limit`` says."""
        if len(self.surplus) >= self.groups:
            return True
        limit = self.max_generation_batches
        if limit is None or self.generation_batches < limit:
            return False
        if self.at_limit == "smaller_batch" and self.surplus:
            return True
        seen = "; ".join(f"{count} dropped: {reason}" for reason, count in self.dropped.most_common())
        raise SamplingExhausted(
            f"{len(self.surplus)} of {self.groups} groups after {limit} generation batches, the limit. "
            f"Of {self.sampled} groups sampled: {seen or 'none dropped'}. The prompts may be too hard or too easy for "
            "this policy: change the data, sample more per group, or raise max_generation_batches"
        )

    def add(self, groups: Sequence[Group], dropped: Sequence[str | None]) -> None:
        """One generation batch: its groups, and for each the reason to drop it or None to keep it."""
        if len(groups) != len(dropped):
            raise ValueError(f"{len(groups)} groups but {len(dropped)} reasons: one each, None to keep")
        self.generation_batches += 1
        self.sampled += len(groups)
        self.surplus += [group for group, reason in zip(groups, dropped, strict=True) if reason is None]
        self.dropped.update(reason for reason in dropped if reason is not None)

    def take(self) -> list[Group]:
        """The training batch, oldest groups first. The counters begin anew for the next one."""
        if not self.full:
            raise ValueError(f"{len(self.surplus)} of {self.groups} groups: add generation batches until full")
        taken, self.surplus = self.surplus[: self.groups], self.surplus[self.groups :]
        self.generation_batches, self.sampled, self.dropped = 0, 0, Counter()
        return taken
