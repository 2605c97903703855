"""The first half of a step: sample, score, shape and filter groups until a batch is full."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlprims.data_proto import DataProto
from rlprims.execution import Models
from rlprims.filters import DynamicSampling, SamplingExhausted
from rlprims.runs.metrics import Clock
from rlprims.trainer.config import Config
from rlprims.trainer.data import Example
from rlprims.trainer.old_groups import OldGroups
from rlprims.trainer.scoring.columns import by_group, first_rows
from rlprims.trainer.scoring.counts import counts_of
from rlprims.trainer.scoring.groups import split_groups, with_baseline_scores
from rlprims.trainer.scoring.rewards import score
from rlprims.trainer.sources import sources_of
from rlprims.trainer.sources.group import Group, GroupSource, Prompts
from rlprims.trainer.sources.pace import check_resumes, generation_limits, is_ahead, pace_of, schedule_of

Filtered = tuple[DataProto, str | None]
"""The rows of a group with shaped scores, and the reason to drop it, or None."""


@dataclass
class Collected:
    """A full batch, and the other groups that were sampled for it."""

    groups: list[DataProto]
    """New groups, and then those of earlier batches."""
    dropped: list[tuple[DataProto, str]]
    """The groups that were not kept, each with the reason (of a greedy baseline: "greedy baseline")."""
    surplus: list[DataProto]
    """The groups that were sampled now and wait for the next batch."""
    metrics: dict[str, float]


@dataclass
class _Batch:
    """A training batch that is being filled."""

    config: Config
    """The settings; ``prompts_per_step`` is without the old groups."""
    first_group: int
    clock: Clock = field(default_factory=Clock)
    passed: dict[int, Filtered] = field(default_factory=dict)
    """The groups that the schedule has passed, by number."""
    greedy: list[DataProto] = field(default_factory=list)
    """The greedy responses, as baselines."""

    def rows(self) -> list[DataProto]:
        """The rows of the groups that were passed, in the order of their numbers."""
        return [self.passed[number][0] for number in sorted(self.passed)]

    def dropped(self) -> list[tuple[DataProto, str]]:
        greedy = [(rows, "greedy baseline") for rows in self.greedy]
        dropped = [(rows, reason) for rows, reason in self.passed.values() if reason is not None]
        return sorted([*greedy, *dropped], key=lambda each: _number(each[0]))

    def metrics(self) -> dict[str, float]:
        sampled, counts = len(self.passed), counts_of(self.rows(), self.config.score_parts)
        reasons = [reason for _, reason in self.passed.values() if reason is not None]
        metrics = {
            "generation_batches": -(-sampled // generation_limits(self.config)[0]),
            "groups_sampled": sampled,
            "groups_dropped": len(reasons),
            "groups_failed": reasons.count("a score is not finite"),
            "filter_yield": 1 - len(reasons) / max(1, sampled),
            "generated_tokens": sum(int(rows["response_mask"].sum()) for rows in [*self.rows(), *self.greedy]),
        }
        metrics |= {f"failures/{cause}": count for cause, count in counts.failures.items()}
        return metrics | counts.means | self.clock.seconds()


class Collector:
    """Collects one training batch after another: a schedule begins groups, a source samples them, a filter keeps some.

    ``take`` and ``prefetch`` are called before an update, ``wait`` after it. Between two steps nothing is sampled,
    unless the pace is "updates": see :mod:`rlprims.trainer.sources.pace`.
    """

    def __init__(self, config: Config, execution: Models, tokenizer: Any, examples: Sequence[Example]) -> None:
        self.config, self.algorithm, self.execution = config, config.algorithm, execution
        self.pace = pace_of(config)
        self.prompts = Prompts(config, examples)
        self.causes: Counter[str] = Counter()
        self.generated_tokens = 0
        self.sampling = _accumulator(self.config)
        self.old_groups = OldGroups(config.old_groups, in_batch=config.prompts_per_step, seed=config.seed)
        self._open: Callable[..., GroupSource] = sources_of(
            config, execution, tokenizer, examples, seed=config.seed, pace=self.pace, count=self.causes.update
        )
        self._source: GroupSource | None = None
        self._schedule = schedule_of(config)
        self._running: dict[int, Group] = {}
        self._begin_again: list[Group] = []
        """Groups that were being sampled when sampling ended."""
        self._scored: list[DataProto] = []
        """Rows with scores that have not been filtered."""
        self._complete: dict[int, Filtered] = {}
        """Groups that are filtered, and that the schedule has not passed, by number."""
        self._start = ThreadPoolExecutor(1, "sampling").submit if execution.overlaps else _completed
        self._ahead: Future[Collected] | None = None

    # What the trainer calls.

    def take(self) -> Collected:
        """The next batch, or the error in its sampling, such as SamplingExhausted."""
        ahead, self._ahead = self._ahead, None
        return self._whole_batch() if ahead is None else ahead.result()

    def prefetch(self) -> None:
        """Begin what is sampled during the update that follows: the next batch, or the groups that may begin."""
        if self.pace == "updates":
            self._begin()
        elif is_ahead(self.config):
            self._ahead = self._start(partial(self._whole_batch, updates=1))

    def wait(self) -> None:
        """Wait until nothing is sampled with the old weights; with the pace "updates" groups continue with new ones."""
        if self.pace == "updates":
            self._schedule.updated()
        elif self._ahead is not None:
            wait([self._ahead])

    def close(self) -> None:
        """Stop sampling after the last step. Groups that are sampled begin again if the run gets more steps."""
        self._begin_again = [*self._running.values(), *self._begin_again]
        self._running.clear()
        if self._source is not None:
            self._source.close()
            self._source = None

    # How a batch is filled.

    def _whole_batch(self, updates: int = 0) -> Collected:
        """The next batch, to train after ``updates``. If it fails, the state is unchanged, unless groups outlive it."""
        if self.pace == "updates":
            return self._fill(updates)
        before, surplus = self._counters(), self.surplus
        try:
            return self._fill(updates)
        except BaseException:
            self._load(before, surplus)
            raise
        finally:
            self.close()
            for groups in (self._begin_again, self._scored, self._complete):
                groups.clear()

    def _fill(self, updates: int) -> Collected:
        old = self.old_groups.draw(self.execution.weights_version + updates)
        new = self.sampling.groups = self.config.prompts_per_step - len(old)
        batch = _Batch(self.config.model_copy(update={"prompts_per_step": new}), first_group=self.prompts.groups)
        self.causes.clear()
        try:
            while not self._is_full(batch):
                self._sample(batch)
        except SamplingExhausted as error:
            scorers = [reward.fn.path for reward in self.config.verifiers()]
            counts = counts_of(batch.rows(), self.config.score_parts)
            raise SamplingExhausted(counts.explain(str(error), scorers, self.config.data.environment)) from None
        self.sampling.surplus.sort(key=_number)
        groups = self.sampling.take()
        surplus = [rows for rows in self.surplus if _number(rows) >= batch.first_group]
        metrics = batch.metrics() | ({"old_groups": len(old)} if self.old_groups.in_batch else {})
        self.generated_tokens += int(metrics["generated_tokens"])
        metrics |= {"surplus": len(self.surplus), "generated_tokens_total": self.generated_tokens}
        metrics |= {f"causes/{cause}": count for cause, count in sorted(self.causes.items())} | self.prompts.metrics()
        self.old_groups.add(groups)
        return Collected([*groups, *old], batch.dropped(), surplus, metrics)

    def _is_full(self, batch: _Batch) -> bool:
        """Whether the batch can be trained on. Raises SamplingExhausted at the limit of generation batches."""
        self.sampling.generation_batches = len(batch.passed) // generation_limits(batch.config)[0]
        return self.sampling.full

    def _sample(self, batch: _Batch) -> None:
        """Sample until the schedule has a batch, or the limit is reached."""
        if self.pace != "updates":
            at_once, batches = generation_limits(batch.config)
            missing, most = batch.config.prompts_per_step - len(self.surplus), batches and batches * at_once
            self._schedule = schedule_of(batch.config, first=self.prompts.groups, missing=missing, most=most)
        self._begin()
        while self._schedule.take() is None:
            self._add_passed(batch)
            if self._is_full(batch):  # a smaller batch, at the limit
                return
            self._begin()
            self._finish_groups(batch)
        self._add_passed(batch)

    def _begin(self) -> None:
        """Begin the groups that the schedule allows."""
        if self._source is None:
            self._source = self._open(self.config.sampling)
        groups = [*self._begin_again, *self.prompts.begin(self._schedule.begin())]
        for group in groups:
            self._source.begin(group)
        self._running |= {group.number: group for group in groups}
        self._begin_again = []

    def _finish_groups(self, batch: _Batch) -> None:
        """Wait until groups are complete, and filter them: those of a round together, in a stream one at a time."""
        assert self._source is not None
        if not self._scored:
            self._scored = self._next_scored(self._source, batch.clock)
        count = 1 if self.pace == "groups" else len(self._scored)
        parts, self._scored = self._scored[:count], self._scored[count:]
        for rows in parts:
            self.prompts.observe(first_rows(rows))
            if "baseline_scores" in self.algorithm.needs:
                rows = self._with_baselines(rows, batch)
            leave_out = self.config.unscored == "leave_out"
            for group, reason in zip(*split_groups(self.algorithm, rows, leave_out=leave_out), strict=True):
                number = _number(group)
                del self._running[number]
                self._complete[number] = group, reason
                self._schedule.finish(number, kept=reason is None or self.pace == "rounds")

    def _next_scored(self, source: GroupSource, clock: Clock) -> list[DataProto]:
        """Wait until groups are complete; returns their rows with scores, in parts that are filtered together."""
        with clock("generate"):
            parts = list(source.take().values())
        if "scores" not in parts[0]:
            with clock("score"):
                parts = list(by_group(score(self.execution, self.config, DataProto.concat(parts))).values())
        return [DataProto.concat(parts)] if self.pace == "rounds" else parts

    def _with_baselines(self, rows: DataProto, batch: _Batch) -> DataProto:
        """The rows with the scores of greedy responses to their prompts."""
        with closing(self._open(self.config.sampling.greedy())) as source:
            for number in by_group(rows):
                source.begin(self._running[number]._replace(samples=self.prompts.next_samples(1)))
            (greedy,) = self._next_scored(source, batch.clock)
        batch.greedy.append(greedy)
        return with_baseline_scores(rows, greedy)

    def _add_passed(self, batch: _Batch) -> None:
        """Add the groups that the schedule has passed to the batch."""
        for number in sorted(self._complete.keys() - self._schedule.waiting.keys()):
            rows, reason = batch.passed[number] = self._complete.pop(number)
            self.sampling.add([rows], [reason])

    # The state.

    @property
    def surplus(self) -> list[DataProto]:
        """Kept groups that wait for a later batch, oldest first."""
        return list(self.sampling.surplus)

    def state_dict(self) -> tuple[dict[str, Any], dict[str, list[DataProto]]]:
        """JSON values, and groups by name; call it between two steps. Running groups begin again after a resume."""
        state: dict[str, Any] = {"collector": self._counters()}
        if self.pace == "updates":
            running = [*self._running.values(), *self._begin_again]
            state["schedule"] = self._schedule.state_dict()
            state["begun"] = [[group.number, group.row, group.samples.start] for group in running]
            state["complete"] = [[number, reason] for number, (_, reason) in self._complete.items()]
            return state, {"complete": [rows for rows, _ in self._complete.values()]}
        groups = {"surplus": self.surplus, "old": self.old_groups.groups}
        if self._ahead is not None and self._ahead.exception() is None:
            ahead = self._ahead.result()
            groups |= {"ahead": ahead.groups, "ahead_dropped": [rows for rows, _ in ahead.dropped]}
            reasons, older = [reason for _, reason in ahead.dropped], len(self.surplus) - len(ahead.surplus)
            state["ahead"] = {"metrics": ahead.metrics, "reasons": reasons, "older_surplus": older}
        return state, groups

    def load_state_dict(self, state: dict[str, Any], groups: dict[str, list[DataProto]]) -> None:
        check_resumes(state, self.pace)
        surplus = groups.get("surplus", [])
        self._load(state["collector"], surplus)
        self.old_groups.groups = groups.get("old", [])
        if self.pace == "updates":
            self._schedule.load_state_dict(state["schedule"])
            self._begin_again = [self.prompts.group(*begun) for begun in sorted(state["begun"])]
            complete = zip(state["complete"], groups.get("complete", []), strict=True)
            self._complete = {number: (rows, reason) for (number, reason), rows in complete}
        elif (ahead := state.get("ahead")) is not None:
            dropped = list(zip(groups.get("ahead_dropped", []), ahead["reasons"], strict=True))
            batch = Collected(groups["ahead"], dropped, surplus[ahead["older_surplus"] :], ahead["metrics"])
            self._ahead = _completed(lambda: batch)

    def _counters(self) -> dict[str, Any]:
        return {**self.prompts.state_dict(), "generated_tokens": self.generated_tokens}

    def _load(self, counters: dict[str, Any], surplus: list[DataProto]) -> None:
        self.prompts.load_state_dict(counters)
        self.generated_tokens = counters["generated_tokens"]
        self.sampling = _accumulator(self.config)
        self.sampling.surplus = surplus


def _accumulator(config: Config) -> DynamicSampling[DataProto]:
    limits, (_, batches) = config.algorithm.filter, generation_limits(config)
    return DynamicSampling(
        groups=config.prompts_per_step, max_generation_batches=batches, at_limit=limits.at_limit if limits else "error"
    )


def _number(rows: DataProto) -> int:
    """The number of the rows' group."""
    return int(rows["group"][0])


def _completed(collect: Callable[[], Collected]) -> Future[Collected]:
    future: Future[Collected] = Future()
    try:
        future.set_result(collect())
    except Exception as error:
        future.set_exception(error)
    return future
