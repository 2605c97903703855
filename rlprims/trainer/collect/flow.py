"""Batches of groups whose sampling continues during updates, so that the sampler never waits for the trainer."""

from typing import Any

from rlprims.data_proto import DataProto
from rlprims.runs.metrics import Clock
from rlprims.trainer.collect.collector import Collected, Collector
from rlprims.trainer.collect.episodes import Group, first_rows
from rlprims.trainer.collect.flowing import Groups, groups_of
from rlprims.trainer.collect.schedule import Schedule


class Flow:
    """Provides batches as :class:`Pipeline` does, for ``staleness`` k of 2 and more.

    Groups are sampled during updates, too. A batch takes the groups that are complete. At most P groups overtake one
    that is not complete, so a group's first token is at most k updates old when it is trained on. Which groups are
    complete depends on time, so two runs differ, unless the execution samples whole batches.
    """

    def __init__(self, collector: Collector, *, staleness: int) -> None:
        groups = collector.config.prompts_per_step
        self.collector = collector
        self.schedule = Schedule(groups=groups, ahead=staleness - 1, window=groups + 1)
        self._groups: Groups | None = None
        self._running: dict[int, tuple[Group, int]] = {}
        """Groups that are being sampled, with the number of their example, by their own number."""
        self._begun: list[tuple[Group, int]] = []
        """Groups that will begin next."""
        self._complete: dict[int, tuple[DataProto, str | None]] = {}
        """Groups that are complete and that no batch has taken or dropped, with the reason to drop them or None."""

    def take(self) -> Collected:
        """The next batch.

        Raises:
            SamplingExhausted: the filter keeps too few.
        """
        clock, dropped = Clock(), list[tuple[DataProto, str]]()
        collector = self.collector
        collector.begin_counts()
        generated, passed = collector.generated_tokens, 0
        self.prefetch()
        while self.schedule.take() is None:
            passed += self._add_passed(dropped)
            collector.check_limit(passed)
            self.prefetch()
            self._score_completed(clock)
        passed += self._add_passed(dropped)
        collector.check_limit(passed)  # also sets the number of generation batches
        groups = sorted(collector.sampling.take(), key=lambda rows: int(rows["group"][0]))
        return Collected(groups, dropped, [], collector.metrics(generated) | clock.seconds())

    def prefetch(self) -> None:
        """Begin as many groups as the schedule allows. They are sampled during the update that follows."""
        numbers = self.schedule.begin()
        self._begun += self.collector.begin_groups(numbers)
        if self._groups is None:
            self._groups = groups_of(self.collector)
        for group, example in self._begun:
            self._groups.begin(group)
            self._running[group.number] = group, example
        self._begun = []

    def wait(self) -> None:
        """Record that the update is done. It waits for nothing: running groups continue with the new weights."""
        self.schedule.updated()

    def close(self) -> None:
        """Stop sampling after the last step. The groups begin again if the run gets more steps."""
        self._begun = [*self._running.values(), *self._begun]
        self._running.clear()
        if self._groups is not None:
            self._groups.close()
            self._groups = None

    def _score_completed(self, clock: Clock) -> None:
        """Wait for a group; score and filter all groups that are complete."""
        assert self._groups is not None
        for number, scored in self._groups.take(clock).items():
            del self._running[number]
            self.collector.observe(first_rows(scored))
            (rows,), (reason,) = self.collector.split(scored)
            self._complete[number] = rows, reason
            self.schedule.finish(number, kept=reason is None)

    def _add_passed(self, dropped: list[tuple[DataProto, str]]) -> int:
        """Add the groups that the schedule has passed since the last call to the batch or to ``dropped``.

        Returns their number.
        """
        numbers = [number for number in self._complete if number not in self.schedule.waiting]
        for number in sorted(numbers):
            rows, reason = self._complete.pop(number)
            self.collector.count(rows)
            self.collector.sampling.add([rows], [reason])
            if reason is not None:
                dropped.append((rows, reason))
        return len(numbers)

    def state_dict(self) -> tuple[dict[str, Any], dict[str, list[DataProto]]]:
        """JSON values, and groups by name. Groups that are being sampled begin again after a resume."""
        begun = [*self._running.values(), *self._begun]
        groups = [[group.number, example, group.samples.start] for group, example in begun]
        reasons = [[number, reason] for number, (_, reason) in self._complete.items()]
        flow = {"schedule": self.schedule.state_dict(), "begun": groups, "complete": reasons}
        rows = [rows for rows, _ in self._complete.values()]
        return {"collector": self.collector.state_dict(), "flow": flow}, {"complete": rows}

    def load_state_dict(self, state: dict[str, Any], groups: dict[str, list[DataProto]]) -> None:
        if "flow" not in state:
            raise ValueError("a run of staleness 0 or 1 cannot be resumed with more: start a new run from its weights")
        flow = state["flow"]
        self.collector.load_state_dict(state["collector"], [])
        self.schedule.load_state_dict(flow["schedule"])
        self._begun = [
            (self.collector.group(number, example, first), example) for number, example, first in sorted(flow["begun"])
        ]
        complete = zip(flow["complete"], groups.get("complete", []), strict=True)
        self._complete = {number: (rows, reason) for (number, reason), rows in complete}
