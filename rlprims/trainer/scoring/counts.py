"""What was sampled and scored for a batch: the counts for its metrics, and for the error if it could not be filled."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from rlprims.algorithms import BoundFunction
from rlprims.data_proto import DataProto
from rlprims.trainer.scoring.columns import first_rows
from rlprims.trainer.scoring.rewards import failure_causes


@dataclass
class Counts:
    """The counts of groups; a sample of several rows counts once."""

    samples: int = 0
    unscored: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """How often each cause kept a sample from being scored."""
    first_failure: str = ""
    means: dict[str, float] = field(default_factory=dict)
    """The means of scores, of their parts and of turns, by the names of their metrics."""

    def explain(self, exhausted: str, scorers: Iterable[str], environment: BoundFunction | None) -> str:
        """The message of an error, with the failures of the scorers or of the environment if there were any."""
        if not self.failures:
            return exhausted
        counted = ", ".join(f"{count} {cause}" for cause, count in self.failures.most_common())
        if self.unscored < self.samples:
            return f"{exhausted}. {self.unscored} of {self.samples} responses could not be scored: {counted}"
        if environment is not None:
            return f"none of {self.samples} episodes of {environment.path} has a score: {counted}; {self.first_failure}"
        return (
            f"none of {self.samples} responses could be scored by {', '.join(scorers)}: {counted}; the first: "
            f"{self.first_failure!r}. Repair the verifier, or what it calls, and call it on one response"
        )


def counts_of(groups: Iterable[DataProto], score_parts: Collection[str]) -> Counts:
    """The counts of the groups. ``score_parts`` are columns with a mean of their own."""
    counts, values = Counts(), defaultdict[str, list[float]](list)
    for rows in groups:
        sampled = first_rows(rows)
        failures = [failure for failure in sampled["failure"] if failure is not None]
        counts.first_failure = counts.first_failure or next(iter(failures), "")
        counts.failures.update(cause for failure in failures for cause in failure_causes(failure))
        counts.samples += len(sampled)
        counts.unscored += int((~sampled["scores"].isfinite()).sum())
        for name in {"scores", "turns", "tool_calls", *score_parts} & rows.batch.keys():
            metric = "score" if name == "scores" else f"score/{name}" if name in score_parts else name
            values[metric] += sampled[name][sampled[name].isfinite()].tolist()
    counts.means = {name: float(np.mean(column)) for name, column in values.items() if column}
    return counts
