"""The first half of a step: generate, score, shape and filter groups until a batch is full."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlprims.data_proto import DataProto
from rlprims.environments import Episode
from rlprims.execution import Models, Stream
from rlprims.filters import DifficultyPools, DynamicSampling, SamplingExhausted
from rlprims.runs.metrics import Clock
from rlprims.runs.rows import RowOrder
from rlprims.trainer.collect.episodes import Group, Player, first_rows
from rlprims.trainer.collect.rewarding import failure_causes
from rlprims.trainer.collect.rollout import prompt_rows, respond, score, split_groups, with_baseline_scores, with_texts
from rlprims.trainer.collect.schedule import Schedule
from rlprims.trainer.config import Config
from rlprims.trainer.data import Example

_COUNTERS = ("samples", "groups", "generated_tokens")


@dataclass
class Collected:
    """A full batch, and the other groups that were sampled for it."""

    groups: list[DataProto]
    dropped: list[tuple[DataProto, str]]
    """The groups that were not kept, each with the reason (of a greedy baseline: "greedy baseline")."""
    surplus: list[DataProto]
    """The groups that were sampled now and wait for the next batch."""
    metrics: dict[str, float]


class Collector:
    """Collects one full batch after another. Its state is ``state_dict`` and the surplus groups."""

    def __init__(self, config: Config, execution: Models, tokenizer: Any, examples: Sequence[Example]) -> None:
        self.config = config
        self.algorithm = config.algorithm
        self.execution = execution
        self.tokenizer = tokenizer
        self.examples = examples
        self.player = Player.of(config, execution, tokenizer)
        self.prompt_width = max(len(example.prompt_ids) for example in examples)
        self.order = RowOrder(len(examples), seed=config.seed, shuffle=config.data.shuffle)
        self.pools = DifficultyPools(config.data.pools) if config.data.pools else None
        self.by_key = {example.key: i for i, example in enumerate(examples)} if self.pools else {}
        self.sampling = self._accumulator()
        self.samples = 0
        self.groups = 0
        self.generated_tokens = 0
        self.scores: defaultdict[str, list[float]] = defaultdict(list)
        self.failures: Counter[str] = Counter()
        self.sampled_rows = self.unscored_rows = 0
        self.first_failure = ""
        self.causes: Counter[str] = Counter()

    def collect(self) -> Collected:
        """The next batch. If it fails, the state is unchanged.

        Raises:
            SamplingExhausted: the filter keeps too few groups.
        """
        before, surplus = self.state_dict(), self.surplus
        try:
            return self._collect()
        except SamplingExhausted as error:
            message = self._with_failures(str(error))
            self.load_state_dict(before, surplus)
            raise SamplingExhausted(message) from None
        except BaseException:
            self.load_state_dict(before, surplus)
            raise

    def _collect(self) -> Collected:
        clock, dropped = Clock(), list[tuple[DataProto, str]]()
        before, first_group = self.generated_tokens, self.groups
        self.begin_counts()
        if self.config.stream:
            self._stream(clock, dropped)
        while not self.sampling.full:
            self._sample(clock, dropped)
        metrics = self.metrics(before) | clock.seconds()
        groups = self.sampling.take()
        surplus = [group for group in self.surplus if int(group["group"][0]) >= first_group]
        return Collected(groups, dropped, surplus, metrics)

    def _sample(self, clock: Clock, dropped: list[tuple[DataProto, str]]) -> None:
        """Sample one generation batch, and add its groups to the batch or to ``dropped``."""
        size = self.algorithm.group_size
        examples = self._draw(self._limits()[0])
        groups = range(self.groups, self.groups + len(examples))
        self.groups += len(examples)

        rows = self._scored(clock, examples, groups, copies=size)
        self.observe(first_rows(rows))
        self.count(rows)
        if "baseline_scores" in self.algorithm.needs:
            greedy = self._scored(clock, examples, groups, copies=1, greedy=True)
            self.generated_tokens += int(greedy["response_mask"].sum())
            rows = with_baseline_scores(rows, greedy)
            dropped.append((greedy, "greedy baseline"))
        self._add(rows, dropped)

    def _stream(self, clock: Clock, dropped: list[tuple[DataProto, str]]) -> None:
        """Sample groups independently of each other, until the batch is full.

        A group is filtered when its last response or episode ends, and another one begins if it is dropped. So the
        batch is full when no group is being sampled, and there is no surplus. The groups of the batch do not depend on
        the order in which they end.
        """
        config, begun = self.config, 0
        at_once, batches = self._limits()
        schedule = Schedule(groups=max(1, config.prompts_per_step - len(self.surplus)), window=None)
        offset, admitted = self.groups, list[tuple[int, DataProto]]()

        def begin() -> list[Group]:
            nonlocal begun
            count = len(schedule.begin())
            allowed = count if batches is None else min(count, batches * at_once - begun)
            begun += allowed
            return [group for group, _ in self.begin_groups(range(self.groups, self.groups + allowed))]

        def admit(group: Group, rows: DataProto, episodes: Sequence[Episode] = ()) -> list[Group]:
            self.count_causes(episodes)
            self.observe(first_rows(rows))
            admitted.append((group.number, rows))
            (reason,) = self._add(rows, dropped)
            schedule.finish(group.number - offset, kept=reason is None)
            schedule.take()
            return begin()

        self.sampling.max_generation_batches = None  # each call of add would count as a batch
        if not self.sampling.full and self.player is not None:
            with clock("generate"):
                self.player.stream(begin(), config.sampling, seed=config.seed, admit=admit)
        elif not self.sampling.full:
            self._stream_responses(begin(), clock, admit)
        for _, rows in sorted(admitted, key=lambda each: each[0]):  # so that sums do not depend on the order of ends
            self.count(rows)
        dropped.sort(key=lambda each: int(each[0]["group"][0]))
        self.sampling.surplus.sort(key=lambda rows: int(rows["group"][0]))
        self.sampling.generation_batches, self.sampling.max_generation_batches = -(-begun // at_once), batches

    def _stream_responses(
        self, first: Sequence[Group], clock: Clock, admit: Callable[[Group, DataProto], Sequence[Group]]
    ) -> None:
        """Sample responses. ``admit`` is called with each group and its scores; it returns the groups to begin next."""
        running = dict[int, Group]()
        with self.open_stream() as stream:

            def begin(groups: Sequence[Group]) -> None:
                running.update({stream.submit(self.prompts_of(group)): group for group in groups})

            begin(first)
            while running:
                with clock("generate"):
                    answers = stream.take()
                with clock("score"):
                    scored = self.scored(answers)
                for part, rows in scored.items():
                    begin(admit(running.pop(part), rows))

    def open_stream(self, *, over_updates: bool = False) -> Stream:
        """A stream of responses to the run's prompts."""
        config = self.config
        return self.execution.stream(
            config.sampling, seed=config.seed, prompt_width=self.prompt_width, over_updates=over_updates
        )

    def prompts_of(self, group: Group) -> DataProto:
        return prompt_rows([group.example], [group.number], copies=len(group.samples), first_sample=group.samples.start)

    def scored(self, answers: Mapping[int, DataProto]) -> dict[int, DataProto]:
        """The groups of a stream with their scores, by the numbers of their parts."""
        rows = with_texts(self.tokenizer, DataProto.concat(list(answers.values())))
        rows = score(self.execution, self.config, rows)
        return dict(zip(answers, rows.split(self.algorithm.group_size), strict=True))

    def _limits(self) -> tuple[int, int | None]:
        """The groups of a generation batch, and the limit of such batches for a training batch; None: no limit."""
        limits = self.algorithm.filter
        at_once = self.config.prompts_per_generation or self.config.prompts_per_step
        # Without a filter only groups with a score that is not a number are dropped.
        return at_once, limits.max_generation_batches if limits else 10

    def check_limit(self, groups: int) -> None:
        """Raise an error if a batch is not full after ``groups`` groups, which are as many as the limit allows.

        Raises:
            SamplingExhausted: the limit is reached.
        """
        at_once, batches = self._limits()
        self.sampling.generation_batches, self.sampling.max_generation_batches = groups // at_once, batches
        try:
            _ = self.sampling.full
        except SamplingExhausted as error:
            raise SamplingExhausted(self._with_failures(str(error))) from None

    def begin_counts(self) -> None:
        """Set the counts of a batch to 0."""
        self.scores.clear()
        self.failures.clear()
        self.sampled_rows = self.unscored_rows = 0
        self.causes.clear()

    def count_causes(self, episodes: Sequence[Episode]) -> None:
        """Count the problems of episodes, for the metrics."""
        self.causes.update(cause for episode in episodes for cause in episode.causes.elements())

    def count(self, rows: DataProto) -> None:
        """Add sampled rows to the counts for the metrics."""
        self.generated_tokens += int(rows["response_mask"].sum())
        config, sampled = self.config, first_rows(rows)
        failures = [failure for failure in sampled["failure"] if failure is not None]
        self.first_failure = self.first_failure if self.failures else next(iter(failures), "")
        self.failures.update(cause for failure in failures for cause in failure_causes(failure))
        self.sampled_rows += len(sampled)
        self.unscored_rows += int((~sampled["scores"].isfinite()).sum())
        for name in {"scores", "turns", "tool_calls", *config.score_parts} & rows.batch.keys():
            metric = "score" if name == "scores" else f"score/{name}" if name in config.score_parts else name
            self.scores[metric] += sampled[name][sampled[name].isfinite()].tolist()

    def _add(self, rows: DataProto, dropped: list[tuple[DataProto, str]]) -> list[str | None]:
        """Add groups to the batch, or to ``dropped`` with the reason; returns for each the reason or None."""
        kept, reasons = self.split(rows)
        self.sampling.add(kept, reasons)
        dropped += [(group, reason) for group, reason in zip(kept, reasons, strict=True) if reason is not None]
        return reasons

    def split(self, rows: DataProto) -> tuple[list[DataProto], list[str | None]]:
        """The groups with shaped scores, and for each the reason to drop it or None."""
        return split_groups(self.algorithm, rows, leave_out=self.config.unscored == "leave_out")

    def begin_groups(self, numbers: Sequence[int]) -> list[tuple[Group, int]]:
        """The next groups, with these numbers, each with the number of its example."""
        first, size = self.samples, self.algorithm.group_size
        examples = self._draw_numbers(len(numbers)) if numbers else []
        self.groups += len(numbers)
        self.samples += len(numbers) * size
        pairs = enumerate(zip(numbers, examples, strict=True))
        return [(self.group(number, example, first + i * size), example) for i, (number, example) in pairs]

    def group(self, number: int, example: int, first_sample: int) -> Group:
        samples = range(first_sample, first_sample + self.algorithm.group_size)
        return Group(number, self.examples[example], samples)

    def _draw(self, count: int) -> list[Example]:
        return [self.examples[number] for number in self._draw_numbers(count)]

    def _draw_numbers(self, count: int) -> list[int]:
        """The next prompts, in the order of the epoch or drawn by the weights of their pools."""
        begun = self.order.position
        drawn = self.order.take(count)
        if self.pools is not None:
            bits = np.random.Philox(key=np.array([self.config.seed, 2**61 + begun], dtype=np.uint64))
            generator = torch.Generator().manual_seed(int(bits.random_raw()) >> 1)
            try:
                keys = self.pools.draw(list(self.by_key), count, generator=generator)
            except ValueError as error:
                raise SamplingExhausted(f"data.pools: {error}. Give a pool more weight, or sample fewer") from None
            drawn = [self.by_key[key] for key in keys]
        return drawn

    def observe(self, sampled: DataProto) -> None:
        """Update the pools with the solve rate of each prompt: the mean of ``acc``, or of the score."""
        if self.pools is None:
            return
        correct, keys = sampled["acc"] if "acc" in sampled else sampled["scores"], sampled["example"]
        rates = {key: correct[torch.tensor((keys == key).tolist())] for key in dict.fromkeys(keys.tolist())}
        finite = {key: rate[rate.isfinite()] for key, rate in rates.items()}
        self.pools.observe({key: float(rate.mean()) for key, rate in finite.items() if len(rate)})

    def _with_failures(self, exhausted: str) -> str:
        """The message with the failures of the verifier, if there were any."""
        if not self.failures:
            return exhausted
        counted = ", ".join(f"{count} {cause}" for cause, count in self.failures.most_common())
        if self.unscored_rows < self.sampled_rows:
            return f"{exhausted}. {self.unscored_rows} of {self.sampled_rows} responses could not be scored: {counted}"
        scorers = ", ".join(reward.path for reward in self.config.verifiers())
        return (
            f"none of {self.sampled_rows} responses could be scored by {scorers}: {counted}; the first: "
            f"{self.first_failure!r}. Repair the verifier, or what it calls, and call it on one response"
        )

    def _scored(
        self, clock: Clock, examples: list[Example], groups: range, *, copies: int, greedy: bool = False
    ) -> DataProto:
        """Responses or episodes with their scores. An environment scores its episodes."""
        config, first = self.config, self.samples
        sampling = config.sampling.greedy() if greedy else config.sampling
        self.samples += len(examples) * copies
        with clock("generate"):
            if self.player is None:
                rows = prompt_rows(examples, groups, copies=copies, first_sample=first)
                rows = respond(
                    self.execution, self.tokenizer, rows, sampling, seed=config.seed, prompt_width=self.prompt_width
                )
            else:
                rows, episodes = self.player.play(
                    examples, groups, sampling, copies=copies, first_sample=first, seed=config.seed
                )
                self.count_causes(episodes)
        if self.player is not None:
            return rows
        with clock("score"):
            return score(self.execution, config, rows)

    def metrics(self, generated_before: int) -> dict[str, float]:
        """The metrics of the full batch, counted since :meth:`begin_counts`."""
        sampling, generated = self.sampling, self.generated_tokens - generated_before
        dropped = sum(sampling.dropped.values())
        metrics = {
            "generation_batches": sampling.generation_batches,
            "groups_sampled": sampling.sampled,
            "groups_dropped": dropped,
            "groups_failed": sampling.dropped["a score is not finite"],
            "filter_yield": 1 - dropped / max(1, sampling.sampled),
            "surplus": max(0, len(sampling.surplus) - sampling.groups),
            "generated_tokens": generated,
            "generated_tokens_total": self.generated_tokens,
        }
        if self.pools is not None:
            pool_of = Counter(self.pools.pool(key) or "unseen" for key in self.by_key)
            metrics |= {f"pools/{name}": pool_of[name] for name in (*self.pools.pools, "unseen")}
        metrics |= {f"failures/{cause}": count for cause, count in self.failures.items()}
        metrics |= {f"causes/{cause}": count for cause, count in sorted(self.causes.items())}
        return metrics | {name: float(np.mean(values)) for name, values in self.scores.items() if values}

    @property
    def surplus(self) -> list[DataProto]:
        """Kept groups that wait for a later batch, oldest first."""
        return list(self.sampling.surplus)

    def state_dict(self) -> dict[str, Any]:
        """The state without the surplus groups, as JSON values."""
        pools = {"pools": self.pools.state_dict()} if self.pools else {}
        return {**{name: getattr(self, name) for name in _COUNTERS}, "prompt_position": self.order.position, **pools}

    def load_state_dict(self, state: dict[str, Any], surplus: list[DataProto]) -> None:
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.order.position = state["prompt_position"]
        if self.pools is not None:
            self.pools.load_state_dict(state["pools"])
        self.sampling = self._accumulator()
        self.sampling.surplus = surplus

    def _accumulator(self) -> DynamicSampling[DataProto]:
        limits, (_, batches) = self.algorithm.filter, self._limits()
        return DynamicSampling(
            groups=self.config.prompts_per_step,
            max_generation_batches=batches,
            at_limit=limits.at_limit if limits else "error",
        )
