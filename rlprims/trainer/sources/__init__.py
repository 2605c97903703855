"""Where groups come from: responses, episodes of an environment, or a recording; and the schedule of groups."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from rlprims.execution import BatchStream, Execution, Sampling, Stream
from rlprims.trainer.data import Example
from rlprims.trainer.sources.continuous import ContinuousEpisodes
from rlprims.trainer.sources.episodes import EpisodeRunner
from rlprims.trainer.sources.group import Group, GroupSource
from rlprims.trainer.sources.pace import Pace
from rlprims.trainer.sources.responses import Responses
from rlprims.trainer.sources.rounds import EpisodeRounds
from rlprims.trainer.sources.schedule import Schedule
from rlprims.trainer.sources.settings import SamplingSettings

__all__ = ["Group", "GroupSource", "Schedule"]


def sources_of(
    config: SamplingSettings,
    execution: Execution,
    tokenizer: Any,
    examples: Sequence[Example],
    *,
    seed: int,
    pace: Pace = "rounds",
    count: Callable[[Iterable[str]], None] = lambda causes: None,
) -> Callable[[Sampling], GroupSource]:
    """A function that opens a source of groups. ``count`` is called with the causes of the problems of episodes."""
    widths, seen = zip(*((len(example.prompt_ids), bool(example.images)) for example in examples), strict=True)
    width, has_images = max(widths), any(seen) or config.data.declares_images
    plays = config.data.environment is not None
    runner = EpisodeRunner(config, execution, tokenizer, count, has_images=has_images) if plays else None

    def stream(sampling: Sampling, prompt_width: int | None) -> Stream:
        if pace == "rounds":
            how: dict[str, Any] = {"sampling": sampling, "seed": seed, "prompt_width": prompt_width}
            return BatchStream(partial(execution.generate, **how))
        return execution.stream(sampling, seed=seed, prompt_width=prompt_width, over_updates=pace == "updates")

    def open_source(sampling: Sampling) -> GroupSource:
        if runner is None:
            return Responses(stream(sampling, width), tokenizer, has_images=has_images)
        if pace == "updates" and execution.overlaps:
            return ContinuousEpisodes(runner, partial(stream, sampling, None))
        return EpisodeRounds(runner, sampling, seed, until_all_end=pace != "groups", as_one=pace == "rounds")

    return open_source
