"""Episodes of an environment: their turns, sampled by an execution, and their rows in a batch."""

import inspect
import math
import re
import warnings
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from rlprims.algorithms import BoundFunction
from rlprims.data_proto import DataProto
from rlprims.ended import Ended
from rlprims.environments import ChatRenderer, Completion, Episode, Renderer, Sampler, TextRenderer, rollout
from rlprims.execution import Execution, Sampling
from rlprims.trainer.data import Example
from rlprims.trainer.scoring.columns import widened
from rlprims.trainer.sources.group import TURN, Group, example_columns
from rlprims.trainer.sources.settings import SamplingSettings
from rlprims.turns import Turn, to_batch

_FIRST = 16  # episodes: if they all fail for one reason, the environment is broken
_RUN = re.compile(r"(<[^<>]+>)\1+")  # the placeholders of an image
_NAMES = ("scores", "turns", "tool_calls", "sample_id", "group", "group_ids", "trajectory_ids", "weights_version")


class TurnPrompt(NamedTuple):
    """What an episode has to say next: a turn that is to be sampled."""

    sample_id: int
    turn: int
    prompt_ids: Sequence[int]
    images: tuple[bytes, ...] = ()


class _LazyEnvironment:
    """An environment that is created from its row at the reset, in the thread and the time limit of the episode."""

    def __init__(self, make: BoundFunction, row: Mapping[str, Any]) -> None:
        self.make, self.row = make, row
        self.__name__ = make.fn.__qualname__  # for messages

    def reset(self) -> Any:
        self.environment = self.make(self.row)
        return self.environment.reset()

    def step(self, message: Any) -> Any:
        return self.environment.step(message)

    def close(self) -> Any:
        close = getattr(getattr(self, "environment", None), "close", None)
        return close() if callable(close) else None


class EpisodeRunner:
    """Runs the episodes of a config: its environment, renderer and limits, and the execution that samples the turns.

    ``count`` is called with the causes of the problems of complete episodes.
    """

    def __init__(
        self,
        config: SamplingSettings,
        execution: Execution,
        tokenizer: Any,
        count: Callable[[Iterable[str]], None] = lambda causes: None,
        *,
        has_images: bool = False,
    ) -> None:
        data, algorithm = config.data, config.algorithm
        assert data.environment is not None
        self.environment, self.execution, self.tokenizer, self.count = data.environment, execution, tokenizer, count
        self.renderer: Renderer = TextRenderer(tokenizer, calls=data.calls or "tags")
        if data.template == "chat":
            self.renderer = ChatRenderer(tokenizer, calls=data.calls or "json", **data.chat(tokenizer).arguments)
        self.image_ids: list[int] | None = None  # tokens that stand for images
        if has_images:  # imported here, because they load transformers
            from transformers import AutoConfig

            from rlprims.execution.hf._vision import placeholders
            from rlprims.trainer.sources.images import ImageRenderer
            from rlprims.vision.processor import load_processor

            path = tokenizer.name_or_path
            processor, self.image_ids = load_processor(path), placeholders(AutoConfig.from_pretrained(path))
            how: dict[str, Any] = {"calls": data.calls or "json", **data.chat(processor).arguments}
            self._image_renderer: Any = partial(ImageRenderer, processor, **how)
            takes = data.images in inspect.signature(self.environment.fn).parameters
            self.images_argument = data.images if takes else None
        tokens = min(config.episode_limits.tokens or execution.context_window, execution.context_window)
        self.limits = config.episode_limits.model_copy(update={"tokens": tokens})
        names = list(algorithm.components)
        if algorithm.filter is not None and "scores" in algorithm.filter.keep.needs:
            names.append(algorithm.filter.metric)
        self.names = tuple(name for name in names if name not in ("scores", "shaped_scores"))
        """Columns that the algorithm reads, which the environment must return."""
        self.needs_acc = "acc" not in self.names or "acc" in algorithm.components
        """False if the filter can read the scores instead of ``acc``."""
        self.first_causes = list[str]()  # why the first episodes failed; empty texts for those that did not

    def episode(self, example: Example, sample_id: int, sample: Sampler) -> Awaitable[Episode]:
        """One episode, for an event loop; ``sample`` draws its turns."""
        fields, renderer = example.fields, self.renderer
        if self.image_ids is not None:
            renderer = self._image_renderer(() if self.images_argument else example.images)
            fields = {**fields, self.images_argument: example.images} if self.images_argument else fields
        environment = _LazyEnvironment(self.environment, fields)
        return rollout(environment, sample, renderer, self.limits, sample_id=sample_id)

    def rows(self, groups: Sequence[Group], episodes: list[Episode]) -> DataProto:
        """The rows of all episodes of the groups, in their order."""
        self.count(cause for episode in episodes for cause in episode.causes.elements())
        names = self._column_names(episodes)
        for episode in episodes:
            cause = (episode.failure or "").partition(": ")[0]
            if len(self.first_causes) < _FIRST:
                self.first_causes.append(cause)
                if cause and self.first_causes == [cause] * _FIRST:
                    raise ValueError(
                        f"all of the first {_FIRST} episodes of {self.environment.path} failed for the same reason, so "
                        f"the run stops here: {episode.failure}"
                    )
            if episode.failure is not None:
                text = f": {episode.failure}. Such episodes have no score; later ones are counted"
                _warn_once(self.environment.path, cause, text)
            if episode.is_done and (missing := sorted(set(names) - episode.columns.keys())):
                raise ValueError(
                    f"{self.environment.path} gave no column {missing}, which the algorithm reads (filter.metric or "
                    f"components): return Step(..., done=True, columns={{{missing[0]!r}: ...}}), or set "
                    "filter.metric: scores"
                )
        of_each = [group for group in groups for _ in group.samples]
        examples, numbers = [group.example for group in of_each], [group.number for group in of_each]
        pad, version = self.execution.pad_token_id, self.execution.weights_version
        how: dict[str, Any] = {"tokenizer": self.tokenizer, "pad_token_id": pad, "version": version, "names": names}
        how["image_ids"] = self.image_ids
        return episode_rows(episodes, examples, numbers, **how)

    def _column_names(self, episodes: Sequence[Episode]) -> tuple[str, ...]:
        """The columns that the episodes must have. If none has ``acc``, the filter reads scores, as with a verifier."""
        done = [episode for episode in episodes if episode.is_done]
        if not done or self.needs_acc or any("acc" in episode.columns for episode in done):
            return self.names
        _warn_once(self.environment.path, "acc", " gives no column acc: the filter looks at scores")
        return tuple(name for name in self.names if name != "acc")

    def complete(self, turns: Sequence[TurnPrompt], sampling: Sampling, seed: int) -> list[Completion]:
        """Sample turns, in one call for each token limit. A nearly full window lowers the limit of a turn."""
        window, most = self.limits.tokens, sampling.max_new_tokens
        allowed = [most if window is None else min(most, window - len(each.prompt_ids)) for each in turns]
        completions = dict[int, Completion]()
        for tokens in sorted(set(allowed), reverse=True):
            these = [i for i, own in enumerate(allowed) if own == tokens]
            how = sampling.model_copy(update={"max_new_tokens": tokens})
            rows = self.execution.generate(turn_rows([turns[i] for i in these]), how, seed=seed, prompt_width=None)
            completions |= zip(these, completions_of(rows), strict=True)
        return [completions[i] for i in range(len(turns))]


def turn_rows(turns: Sequence[TurnPrompt]) -> DataProto:
    """The prompts of turns, as an execution samples them."""
    images = {"images": [each.images for each in turns]} if any(each.images for each in turns) else {}
    return DataProto.from_dict(
        tensors={"sample_id": torch.tensor([each.sample_id + TURN * each.turn for each in turns])},
        non_tensors={"prompt_ids": [list(each.prompt_ids) for each in turns], **images},
    )


def completions_of(rows: DataProto) -> list[Completion]:
    """The turns that an execution sampled."""
    completions, kept = list[Completion](), None
    for i in range(len(rows)):
        mask = rows["attention_mask"][i, rows["prompts"].shape[1] :].bool()
        if "kept_ids" in rows:
            parts = rows["kept_ids"][i].split(rows["kept_counts"][i][mask].tolist())
            kept = [part.tolist() or None for part in parts]
        of_tokens = rows["versions"][i][mask].tolist() if "versions" in rows else None
        completions.append(
            Completion(
                rows["responses"][i][mask].tolist(),
                rows["rollout_log_probs"][i][mask].tolist(),
                finish=Ended(int(rows["ended"][i])).label,  # type: ignore[arg-type]
                version=of_tokens or int(rows["weights_version"][i]),
                kept=kept,
                trainable=rows["response_mask"][i][mask].tolist(),
            )
        )
    return completions


_WARNED: set[tuple[str, str]] = set()


def _warn_once(path: str, cause: str, text: str) -> None:
    if (path, cause) not in _WARNED:
        _WARNED.add((path, cause))
        warnings.warn(f"{path}{text}", stacklevel=4)


def episode_rows(
    episodes: Sequence[Episode],
    examples: Sequence[Example],
    groups: Sequence[int],
    *,
    tokenizer: Any,
    pad_token_id: int,
    version: int,
    names: Sequence[str] = (),
    image_ids: Sequence[int] | None = None,
) -> DataProto:
    """The rows of the episodes, in order. An episode in which nothing was sampled has one row without tokens.

    They have the columns of :func:`rlprims.turns.to_batch`; ``scores``, ``turns``, ``tool_calls`` and the numbers that
    the environment returned, (B,); ``state_ids`` (B, T); and ``turn_rewards`` (B, T), the rewards of all turns except
    the one that ended the episode, whose reward is part of the score. A number that an episode did not return, such as
    ``acc`` if a limit ended it, is 0, or NaN if the environment failed. The columns ``names`` always exist. With
    ``image_ids``, the placeholders, there is the column ``images``, and they are not in ``observation_mask``.
    """
    numbers: dict[Hashable, int] = {}
    rollouts = [replace(e, turns=_with_states(e, numbers, pad_token_id)).rows() for e in episodes]
    batch = to_batch(rollouts, groups, pad_id=pad_token_id)
    which: list[int] = batch["trajectory_ids"].tolist()
    columns = {name: column for name, column in batch.batch.items() if name not in ("trajectory_ids", "group_ids")}
    columns["turn_rewards"] = columns.pop("rewards")
    columns.setdefault("state_ids", torch.zeros_like(columns["turn_ids"]))  # if nothing was sampled
    if batch["responses"].shape[1] == 0:
        columns = widened(columns, prompts=0, responses=1, pad_token_id=pad_token_id)
    returned = dict.fromkeys([*names, *(name for episode in episodes for name in episode.columns)])
    if reserved := sorted(returned.keys() & {*columns, *_NAMES}):
        raise ValueError(f"Step.columns has {reserved}, which are the trainer's own names: give them other names")
    of_episodes = {
        "scores": [episode.score for episode in episodes],
        "turns": [float(len(episode.turns)) for episode in episodes],
        "tool_calls": [float(episode.tool_calls) for episode in episodes],
    }
    for name in returned:
        of_episodes[name] = [e.columns.get(name, math.nan if e.failure else 0.0) for e in episodes]
    columns |= {name: torch.tensor(values)[which] for name, values in of_episodes.items()}
    columns["sample_id"] = torch.tensor([episodes[i].sample_id for i in which])
    columns["group"] = torch.tensor([groups[i] for i in which], dtype=torch.int64)
    mask = columns["response_mask"]
    oldest = columns["versions"].masked_fill(~mask, 2**62).amin(-1)
    columns["weights_version"] = torch.where(mask.any(-1), oldest, version)
    rows = [row for of_episode in rollouts for row in of_episode]
    prompt_ids = [list(row.token_ids[: row.prompt_length]) for row in rows]
    texts = {
        "prompt": [tokenizer.decode(ids) for ids in prompt_ids],
        "prompt_ids": prompt_ids,
        "response": [tokenizer.decode(list(x.token_ids[x.prompt_length :]), skip_special_tokens=True) for x in rows],
        **example_columns([examples[i] for i in which]),
        "failure": [episodes[i].failure for i in which],
    }
    if image_ids is not None:
        columns["observation_mask"] &= ~torch.isin(columns["responses"], torch.tensor(image_ids))
        texts["images"] = list(batch.non_tensor_batch.get("images", [()] * len(rows)))
        texts["prompt"] = [_RUN.sub(r"\1", text) for text in texts["prompt"]]
    return DataProto.from_dict(tensors=columns, non_tensors=texts)


def _with_states(episode: Episode, numbers: dict[Hashable, int], pad_token_id: int) -> list[Turn]:
    """The turns with ``state_ids``, the number of the state that each turn answers, and without the last reward."""
    turns = [
        replace(
            turn, extras={**turn.extras, "state_ids": [numbers.setdefault(state, len(numbers))] * len(turn.sampled_ids)}
        )
        for turn, state in zip(episode.turns, episode.states, strict=True)
    ]
    if not turns:
        return [Turn([pad_token_id], [], [], finish=episode.ended)]
    return [*turns[:-1], replace(turns[-1], reward=0.0)] if episode.is_done else turns
