"""Episodes of an environment instead of responses: many at the same time, as rows of a batch."""

import math
import warnings
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlprims.algorithms import Use
from rlprims.data_proto import DataProto
from rlprims.ended import Ended
from rlprims.environments import (
    ChatRenderer,
    Completion,
    Environment,
    Episode,
    Limits,
    Renderer,
    Sample,
    TextRenderer,
    rollout,
)
from rlprims.execution import Execution, Sampling
from rlprims.grouping import dense_ids
from rlprims.trainer.collect.rounds import Begun, Request, play_rounds
from rlprims.trainer.config import Config
from rlprims.trainer.data import Example
from rlprims.turns import Turn, to_batch

TURN = 2**40
"""A turn's randomness is that of the sample with the number ``sample_id + turn * TURN``, so a function of
(seed, sample, turn); a first turn is drawn as a response without an environment is."""
_NAMES = ("scores", "turns", "tool_calls", "sample_id", "group", "group_ids", "trajectory_ids", "weights_version")


class Group(NamedTuple):
    """The episodes of one example."""

    number: int
    example: Example
    samples: range

    @classmethod
    def numbered(
        cls, examples: Sequence[Example], groups: Sequence[int], *, copies: int, first_sample: int
    ) -> list["Group"]:
        """One after another, ``copies`` samples each."""
        each = enumerate(zip(examples, groups, strict=True))
        starts = [(first_sample + i * copies, example, group) for i, (example, group) in each]
        return [cls(group, example, range(start, start + copies)) for start, example, group in starts]


class _Made:
    """An environment that is created from a row when its episode begins: in the episode's thread, within its time."""

    def __init__(self, make: Use, row: Mapping[str, Any]) -> None:
        self.make, self.row = make, row
        self.__name__ = make.fn.__qualname__  # for messages

    def reset(self) -> Any:
        self.environment: Environment = self.make(self.row)
        return self.environment.reset()

    def step(self, message: Any) -> Any:
        return self.environment.step(message)

    def close(self) -> Any:
        close = getattr(getattr(self, "environment", None), "close", None)
        return close() if callable(close) else None


@dataclass(frozen=True)
class Player:
    """Runs episodes with an execution: one call of ``generate`` samples the next turns of all active episodes."""

    environment: Use
    renderer: Renderer
    limits: Limits
    execution: Execution
    tokenizer: Any
    names: tuple[str, ...] = ()
    """Columns that the algorithm reads and the environment must return."""
    optional: str = ""
    """One of them in the place of which there are scores."""

    @classmethod
    def of(cls, config: Config, execution: Execution, tokenizer: Any) -> "Player | None":
        """The player of a config; None if it has no environment."""
        data = config.data
        if data.environment is None:
            return None
        kind = ChatRenderer if data.template == "chat" else TextRenderer
        renderer = kind(tokenizer) if data.calls is None else kind(tokenizer, calls=data.calls)
        tokens = min(config.limits.tokens or execution.context_window, execution.context_window)
        limits = config.limits.model_copy(update={"tokens": tokens})
        names = list(config.algorithm.components)
        if config.algorithm.filter is not None and "scores" in config.algorithm.filter.keep.needs:
            names.append(config.algorithm.filter.metric)
        asked = tuple(name for name in names if name not in ("scores", "shaped_scores"))
        optional = "acc" if "acc" in asked and "acc" not in config.algorithm.components else ""
        return cls(data.environment, renderer, limits, execution, tokenizer, asked, optional)

    def play(
        self,
        examples: Sequence[Example],
        groups: Sequence[int],
        sampling: Sampling,
        *,
        copies: int,
        first_sample: int,
        seed: int,
    ) -> tuple[DataProto, list[Episode]]:
        """Each example's episodes, ``copies`` of them, side by side; samples are numbered from ``first_sample``."""
        first = Group.numbered(examples, groups, copies=copies, first_sample=first_sample)
        found = dict[int, Episode]()

        def ended(episodes: list[Episode]) -> Begun:
            found.update({episode.sample_id: episode for episode in episodes})
            return ()

        self._play_rounds(first, sampling, seed, ended)
        episodes = [found[first_sample + i] for i in range(len(found))]
        return self.rows_of(first, episodes), episodes

    def stream(
        self,
        first: Sequence["Group"],
        sampling: Sampling,
        *,
        seed: int,
        admit: Callable[["Group", DataProto, list[Episode]], Sequence["Group"]],
    ) -> None:
        """Sample groups; ``admit`` gets each when its last episode ended, and returns the groups that begin next."""
        open_groups = list(first)
        parts = dict[int, list[Episode]]()

        def ended(episodes: list[Episode]) -> Begun:
            begun = list[Group]()
            for episode in episodes:
                group = next(group for group in open_groups if episode.sample_id in group.samples)
                parts.setdefault(group.number, []).append(episode)
                if len(parts[group.number]) == len(group.samples):
                    open_groups.remove(group)
                    own = sorted(parts.pop(group.number), key=lambda each: each.sample_id)
                    begun += admit(group, self.rows_of([group], own), own)
            open_groups.extend(begun)
            return self._begun(begun)

        self._play_rounds(first, sampling, seed, ended)

    def _play_rounds(
        self, first: Sequence["Group"], sampling: Sampling, seed: int, ended: Callable[[list[Episode]], Begun]
    ) -> None:
        play_rounds(
            self._begun(first),
            play=self._rollout,
            complete=lambda asked: self._complete(asked, sampling, seed),
            ended=ended,
        )

    def _rollout(self, environment: Environment, sample: Sample, sample_id: int) -> Awaitable[Episode]:
        return rollout(environment, sample, self.renderer, self.limits, sample_id=sample_id)

    def play_one(self, example: Example, sample_id: int, sample: Sample) -> Awaitable[Episode]:
        """One episode, for an event loop; ``sample`` gives its turns."""
        return self._rollout(_Made(self.environment, example.fields), sample, sample_id)

    def _begun(self, groups: Sequence["Group"]) -> Begun:
        samples = [(group.example.fields, sample_id) for group in groups for sample_id in group.samples]
        return [(_Made(self.environment, fields), sample_id) for fields, sample_id in samples]

    def rows_of(self, groups: Sequence["Group"], episodes: list[Episode]) -> DataProto:
        """The rows of all episodes of the groups, in their order."""
        names = self._given(episodes)
        for episode in episodes:
            _report(self.environment.path, episode)
            if episode.is_done and (missing := sorted(set(names) - episode.columns.keys())):
                raise ValueError(
                    f"{self.environment.path} gave no column {missing}, which the algorithm reads (filter.metric or "
                    f"components): return Step(..., done=True, columns={{{missing[0]!r}: ...}}), or set "
                    "filter.metric: scores"
                )
        return episode_rows(
            episodes,
            [group.example for group in groups for _ in group.samples],
            [group.number for group in groups for _ in group.samples],
            tokenizer=self.tokenizer,
            pad_token_id=self.execution.pad_token_id,
            version=self.execution.weights_version,
            names=names,
        )

    def _given(self, episodes: Sequence[Episode]) -> tuple[str, ...]:
        """The columns of the episodes. Without ``acc`` the filter reads scores, as with a verifier."""
        done = [episode for episode in episodes if episode.is_done]
        if not done or not self.optional or any(self.optional in episode.columns for episode in done):
            return self.names
        if (self.environment.path, self.optional) not in _REPORTED:
            _REPORTED.add((self.environment.path, self.optional))
            warnings.warn(f"{self.environment.path} gives no column acc: the filter looks at scores", stacklevel=3)
        return tuple(name for name in self.names if name != self.optional)

    def _complete(self, asked: list[Request], sampling: Sampling, seed: int) -> list[Completion]:
        """One call of the execution, and one more for each smaller token limit that a nearly full window sets."""
        window, most = self.limits.tokens, sampling.max_new_tokens
        allowed = [most if window is None else min(most, window - len(each.prompt_ids)) for each in asked]
        completions = dict[int, Completion]()
        for tokens in sorted(set(allowed), reverse=True):
            these = [i for i, own in enumerate(allowed) if own == tokens]
            prompts = self.prompts_of([asked[i] for i in these])
            how = sampling.model_copy(update={"max_new_tokens": tokens})
            rows = self.execution.generate(prompts, how, seed=seed, prompt_width=None)
            completions |= zip(these, self.completions_of(rows), strict=True)
        return [completions[i] for i in range(len(asked))]

    @staticmethod
    def prompts_of(asked: Sequence[Request]) -> DataProto:
        """The prompts of turns, as an execution samples them."""
        return DataProto.from_dict(
            tensors={"sample_id": torch.tensor([each.sample_id + TURN * each.turn for each in asked])},
            non_tensors={"prompt_ids": [list(each.prompt_ids) for each in asked]},
        )

    @staticmethod
    def completions_of(rows: DataProto) -> list[Completion]:
        """The turns that an execution sampled."""
        found, kept = list[Completion](), None
        for i in range(len(rows)):
            mask = rows["response_mask"][i]
            if "kept_ids" in rows:
                parts = rows["kept_ids"][i].split(rows["kept_counts"][i][mask].tolist())
                kept = [part.tolist() or None for part in parts]
            of_tokens = rows["versions"][i][mask].tolist() if "versions" in rows else None
            found.append(
                Completion(
                    rows["responses"][i][mask].tolist(),
                    rows["rollout_log_probs"][i][mask].tolist(),
                    finish=Ended(int(rows["ended"][i])).label,  # type: ignore[arg-type]
                    version=of_tokens or int(rows["weights_version"][i]),
                    kept=kept,
                )
            )
        return found


_REPORTED: set[tuple[str, str]] = set()


def _report(path: str, episode: Episode) -> None:
    """Warn of the first failure of each cause."""
    cause = next(reversed(episode.causes), "")
    if episode.failure is not None and (path, cause) not in _REPORTED:
        _REPORTED.add((path, cause))
        warnings.warn(f"{path}: {episode.failure}. Such episodes have no score; later ones are counted", stacklevel=3)


def episode_rows(
    episodes: Sequence[Episode],
    examples: Sequence[Example],
    groups: Sequence[int],
    *,
    tokenizer: Any,
    pad_token_id: int,
    version: int,
    names: Sequence[str] = (),
) -> DataProto:
    """The rows of the episodes, neighbours if an episode has several; one without a token where nothing was sampled.

    Beside the columns of :func:`rlprims.turns.to_batch`: ``scores``, ``turns``, ``tool_calls`` and the environment's
    own numbers (B,), ``state_ids`` (B, T), and ``turn_rewards`` (B, T), of all turns but the one that ended the
    episode: its reward is the outcome, which the estimators get by the score. A number that an episode did not give,
    such as ``acc`` of one that a limit ended, is 0, and NaN if its environment failed. ``names`` are always there.
    """
    numbers: dict[Hashable, int] = {}
    rollouts = [replace(e, turns=_with_states(e, numbers, pad_token_id)).rows() for e in episodes]
    batch = to_batch(rollouts, groups, pad_id=pad_token_id)
    which: list[int] = batch["trajectory_ids"].tolist()
    columns = {name: column for name, column in batch.batch.items() if name not in ("trajectory_ids", "group_ids")}
    columns["turn_rewards"] = columns.pop("rewards")
    columns.setdefault("state_ids", torch.zeros_like(columns["turn_ids"]))  # nothing was sampled at all
    if batch["responses"].shape[1] == 0:
        columns = widened(columns, prompts=0, responses=1, pad_token_id=pad_token_id)
    given = dict.fromkeys([*names, *(name for episode in episodes for name in episode.columns)])
    if taken := sorted(given.keys() & {*columns, *_NAMES}):
        raise ValueError(f"Step.columns has {taken}, which are the trainer's own names: give them other names")
    of_episodes = {
        "scores": [episode.score for episode in episodes],
        "turns": [float(len(episode.turns)) for episode in episodes],
        "tool_calls": [float(episode.tool_calls) for episode in episodes],
        **{
            name: [episode.columns.get(name, math.nan if episode.failure else 0.0) for episode in episodes]
            for name in given
        },
    }
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
        "response": [
            tokenizer.decode(list(row.token_ids[row.prompt_length :]), skip_special_tokens=True) for row in rows
        ],
        "question": [examples[i].question for i in which],
        "answer": [examples[i].answer for i in which],
        "data_source": [examples[i].data_source for i in which],
        "fields": [examples[i].fields for i in which],
        "example": [examples[i].key for i in which],
        "failure": [episodes[i].failure for i in which],
    }
    return DataProto.from_dict(tensors=columns, non_tensors=texts)


def _with_states(episode: Episode, numbers: dict[Hashable, int], pad_token_id: int) -> list[Turn]:
    """The turns with a number for the state that each answers, on its tokens, and without the outcome's reward."""
    turns = [
        replace(
            turn, extras={**turn.extras, "state_ids": [numbers.setdefault(state, len(numbers))] * len(turn.sampled_ids)}
        )
        for turn, state in zip(episode.turns, episode.states, strict=True)
    ]
    if not turns:
        return [Turn([pad_token_id], [], [], finish=episode.ended)]
    return [*turns[:-1], replace(turns[-1], reward=0.0)] if episode.is_done else turns


def first_rows(rows: DataProto) -> DataProto:
    """One row of each sample; of several, which are neighbours, the first."""
    sample_id = rows["sample_id"]
    changes = torch.ones(len(rows), dtype=torch.bool)
    changes[1:] = sample_id[1:] != sample_id[:-1]
    picked: DataProto = rows[changes]
    return picked


def rollout_ids(rows: DataProto) -> dict[str, Tensor]:
    """``group_ids``, and ``trajectory_ids`` of episodes, whose rows may be several."""
    ids = {"group_ids": dense_ids(rows["group"])}
    return {**ids, "trajectory_ids": dense_ids(rows["sample_id"])} if "turn_rewards" in rows else ids


def outcome_scores(shaped_scores: Tensor, turn_rewards: Tensor, trajectory_ids: Tensor) -> Tensor:
    """(B,): the scores minus the rewards of their turns; shaping terms stay in."""
    earned = torch.zeros_like(shaped_scores).index_add(0, trajectory_ids, turn_rewards.sum(-1))
    return shaped_scores - earned[trajectory_ids]


def same_widths(groups: Sequence[DataProto], *, pad_token_id: int) -> list[DataProto]:
    """The groups, with prompts and responses padded to the widest."""
    prompts = max(group["prompts"].shape[1] for group in groups)
    responses = max(group["responses"].shape[1] for group in groups)
    wide = list[DataProto]()
    for group in groups:
        more = {"prompts": prompts - group["prompts"].shape[1], "responses": responses - group["responses"].shape[1]}
        if any(more.values()):
            columns = widened(dict(group.batch.items()), **more, pad_token_id=pad_token_id)
            group = DataProto.from_dict(tensors=columns, non_tensors=dict(group.non_tensor_batch))
        wide.append(group)
    return wide


def widened(columns: Mapping[str, Tensor], *, prompts: int, responses: int, pad_token_id: int) -> dict[str, Tensor]:
    """Pad prompts on the left, and responses and columns of their shape on the right."""
    width = columns["responses"].shape[1]

    def pad(name: str, x: Tensor) -> Tensor:
        if name == "kept_ids" or x.dim() < 2:
            return x
        left = prompts if name in ("prompts", "attention_mask") else 0
        right = responses if name == "attention_mask" or (name != "prompts" and x.shape[1] == width) else 0
        value = pad_token_id if name in ("prompts", "responses") else 0
        parts = [x.new_full((len(x), count, *x.shape[2:]), value) for count in (left, right)]
        return torch.cat([parts[0], x, parts[1]], 1)

    return {name: pad(name, x) for name, x in columns.items()}
