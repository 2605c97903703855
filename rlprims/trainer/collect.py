"""The first half of a step: generate, score, filter and shape until a batch of groups is full."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlprims.data_proto import DataProto
from rlprims.execution import Execution
from rlprims.filters import DynamicSampling, SamplingExhausted
from rlprims.trainer.config import Config
from rlprims.trainer.data import Example, PromptOrder
from rlprims.trainer.episodes import Player, first_rows
from rlprims.trainer.measures import Clock
from rlprims.trainer.rewarding import causes
from rlprims.trainer.rollout import prompt_rows, respond, score, split_groups, with_baseline

_COUNTERS = ("samples", "groups", "generated_tokens")


@dataclass
class Collected:
    """A full batch, and what became of all else that was sampled for it."""

    groups: list[DataProto]
    dropped: list[tuple[DataProto, str]]
    """The groups that were not kept, each with the reason; greedy baselines have theirs too."""
    surplus: list[DataProto]
    """The groups that were sampled now and wait for the next batch."""
    metrics: dict[str, float]


class Collector:
    """Full batches, one after another. ``state_dict`` and the surplus groups are all of its state."""

    def __init__(self, config: Config, execution: Execution, tokenizer: Any, examples: Sequence[Example]) -> None:
        self.config = config
        self.algorithm = config.algorithm
        self.execution = execution
        self.tokenizer = tokenizer
        self.examples = examples
        self.player = Player.of(config, execution, tokenizer)
        self.prompt_width = max(len(example.prompt_ids) for example in examples)
        self.order = PromptOrder(len(examples), seed=config.seed, shuffle=config.data.shuffle)
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
        """The next batch; if it fails, the state is as it was.

        Raises:
            SamplingExhausted: the filter keeps too few.
        """
        before, surplus = self.state_dict(), self.surplus
        try:
            return self._collect()
        except SamplingExhausted as error:
            told = self._with_failures(str(error))
            self.load_state_dict(before, surplus)
            raise SamplingExhausted(told) from None
        except BaseException:
            self.load_state_dict(before, surplus)
            raise

    def _collect(self) -> Collected:
        clock, dropped = Clock(), list[tuple[DataProto, str]]()
        before, first_group = self.generated_tokens, self.groups
        self.scores.clear()
        self.failures.clear()
        self.sampled_rows = self.unscored_rows = 0
        self.causes.clear()
        while not self.sampling.full:
            self._sample(clock, dropped)
        metrics = self._metrics(self.generated_tokens - before) | clock.seconds()
        groups = self.sampling.take()
        surplus = [group for group in self.surplus if int(group["group"][0]) >= first_group]
        return Collected(groups, dropped, surplus, metrics)

    def _sample(self, clock: Clock, dropped: list[tuple[DataProto, str]]) -> None:
        """One generation batch: its groups go to the accumulator, or to ``dropped`` with the reason."""
        config, size = self.config, self.algorithm.group_size
        examples = [self.examples[i] for i in self.order.take(config.prompts_per_generation or config.prompts_per_step)]
        groups = range(self.groups, self.groups + len(examples))
        self.groups += len(examples)

        rows = self._scored(clock, examples, groups, copies=size)
        sampled = first_rows(rows)
        failures = [failure for failure in sampled["failure"] if failure is not None]
        self.first_failure = self.first_failure if self.failures else next(iter(failures), "")
        self.failures.update(cause for failure in failures for cause in causes(failure))
        self.sampled_rows += len(sampled)
        self.unscored_rows += int((~sampled["scores"].isfinite()).sum())
        for name in {"scores", "turns", "tool_calls", *config.score_parts} & rows.batch.keys():
            metric = "score" if name == "scores" else f"score/{name}" if name in config.score_parts else name
            self.scores[metric] += sampled[name][sampled[name].isfinite()].tolist()
        if "baseline_scores" in self.algorithm.needs:
            greedy = self._scored(clock, examples, groups, copies=1, greedy=True)
            rows = with_baseline(rows, greedy)
            dropped.append((greedy, "greedy baseline"))
        kept, reasons = split_groups(self.algorithm, rows, leave_out=config.unscored == "leave_out")
        self.sampling.add(kept, reasons)
        dropped += [(group, reason) for group, reason in zip(kept, reasons, strict=True) if reason is not None]

    def _with_failures(self, exhausted: str) -> str:
        """Why there is no batch: the prompts are not to blame where no response could be scored."""
        if not self.failures:
            return exhausted
        counted = ", ".join(f"{count} {cause}" for cause, count in self.failures.most_common())
        if self.unscored_rows < self.sampled_rows:
            return f"{exhausted}. {self.unscored_rows} of {self.sampled_rows} responses could not be scored: {counted}"
        scorers = ", ".join(reward.path for reward in self.config.verifiers())
        return (
            f"none of {self.sampled_rows} responses could be scored by {scorers}: {counted}; the first: "
            f"{self.first_failure!r}. Mend the verifier, or what it calls, and try it by hand on one response"
        )

    def _scored(
        self, clock: Clock, examples: list[Example], groups: range, *, copies: int, greedy: bool = False
    ) -> DataProto:
        """Responses, or episodes, with their scores. Responses are scored together, episodes by their environment."""
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
                self.causes.update(cause for episode in episodes for cause in episode.causes.elements())
        self.generated_tokens += int(rows["response_mask"].sum())
        if self.player is not None:
            return rows
        with clock("score"):
            return score(self.execution, config, rows)

    def _metrics(self, generated: int) -> dict[str, float]:
        sampling = self.sampling
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
        metrics |= {f"failures/{cause}": count for cause, count in self.failures.items()}
        metrics |= {f"causes/{cause}": count for cause, count in sorted(self.causes.items())}
        return metrics | {name: float(np.mean(values)) for name, values in self.scores.items() if values}

    @property
    def surplus(self) -> list[DataProto]:
        """Kept groups that wait, oldest first."""
        return list(self.sampling.surplus)

    def state_dict(self) -> dict[str, Any]:
        """All but the surplus groups, as JSON values."""
        return {**{name: getattr(self, name) for name in _COUNTERS}, "prompt_position": self.order.position}

    def load_state_dict(self, state: dict[str, Any], surplus: list[DataProto]) -> None:
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.order.position = state["prompt_position"]
        self.sampling = self._accumulator()
        self.sampling.surplus = surplus

    def _accumulator(self) -> DynamicSampling[DataProto]:
        limits = self.algorithm.filter
        return DynamicSampling(
            groups=self.config.prompts_per_step,
            # Without a filter only groups with a score that is not a number are dropped.
            max_generation_batches=limits.max_generation_batches if limits else 10,
            at_limit=limits.at_limit if limits else "error",
        )
