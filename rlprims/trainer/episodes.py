"""Episodes of an environment in the place of responses: many at once, as rows of a batch."""

import asyncio
import math
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlprims.algorithms import Use
from rlprims.data_proto import DataProto
from rlprims.ended import Ended
from rlprims.environments import ChatRenderer, Completion, Environment, Episode, Limits, Renderer, TextRenderer, rollout
from rlprims.execution import Execution, Sampling
from rlprims.grouping import dense_ids
from rlprims.trainer.config import Config
from rlprims.trainer.data import Example
from rlprims.turns import Turn, to_batch

_TURN = 2**40
"""A turn's randomness is that of the sample with the number ``sample_id + turn * _TURN``, so a function of
(seed, sample, turn); a first turn is drawn as a response without an environment is."""
_NAMES = ("scores", "turns", "tool_calls", "sample_id", "group", "group_ids", "trajectory_ids", "weights_version")


class _Request(NamedTuple):
    """A turn that an episode waits for."""

    sample_id: int
    turn: int
    prompt_ids: Sequence[int]
    future: "asyncio.Future[Completion]"


class _Made:
    """An environment that is made of a row when its episode begins: in the episode's thread, and within its time."""

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
    """Plays episodes with an execution: the next turns of all that go on are one call of ``generate``."""

    environment: Use
    renderer: Renderer
    limits: Limits
    execution: Execution
    tokenizer: Any
    names: tuple[str, ...] = ()
    """Columns that the algorithm reads, and the environment must give."""

    @classmethod
    def of(cls, config: Config, execution: Execution, tokenizer: Any) -> "Player | None":
        """That of a config; None if it has no environment."""
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
        return cls(data.environment, renderer, limits, execution, tokenizer, asked)

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
        played = [(example, group) for example, group in zip(examples, groups, strict=True) for _ in range(copies)]
        environments = [_Made(self.environment, example.fields) for example, _ in played]
        episodes = self._run(environments, first_sample, lambda asked: self._complete(asked, sampling, seed))
        for episode in episodes:
            _report(self.environment.path, episode)
            if episode.is_done and (missing := sorted(set(self.names) - episode.columns.keys())):
                raise ValueError(
                    f"{self.environment.path} gave no column {missing}, which the algorithm reads (filter.metric or "
                    f"components): return Step(..., done=True, columns={{{missing[0]!r}: ...}}), or set "
                    "filter.metric: scores"
                )
        rows = episode_rows(
            episodes,
            [example for example, _ in played],
            [group for _, group in played],
            tokenizer=self.tokenizer,
            pad_token_id=self.execution.pad_token_id,
            version=self.execution.weights_version,
            names=self.names,
        )
        return rows, episodes

    def _run(
        self,
        environments: Sequence[Environment],
        first_sample: int,
        complete: Callable[[list[_Request]], list[Completion]],
    ) -> list[Episode]:
        """Environments run in the event loop of a thread; this thread samples what all episodes that go on wait for.

        So the batches of turns do not depend on who answers first.
        """
        loop, live, waiting = _event_loop(), len(environments), list[_Request]()
        batches: SimpleQueue[list[_Request] | None] = SimpleQueue()

        def send_if_all_wait() -> None:
            if waiting and len(waiting) == live:
                batches.put(sorted(waiting, key=lambda request: request.sample_id))
                waiting.clear()

        async def sample(prompt_ids: Sequence[int], sample_id: int, turn: int) -> Completion:
            waiting.append(_Request(sample_id, turn, prompt_ids, loop.create_future()))
            answer = waiting[-1].future
            send_if_all_wait()
            return await answer

        async def one(environment: Environment, sample_id: int) -> Episode:
            nonlocal live
            try:
                return await rollout(environment, sample, self.renderer, self.limits, sample_id=sample_id)
            finally:
                live -= 1
                send_if_all_wait()

        async def every() -> list[Episode | BaseException]:
            try:
                playing = (one(environment, first_sample + i) for i, environment in enumerate(environments))
                return await asyncio.gather(*playing, return_exceptions=True)
            finally:
                batches.put(None)

        playing = asyncio.run_coroutine_threadsafe(every(), loop)
        failure: Exception | None = None
        try:
            while (asked := batches.get()) is not None:
                try:
                    if failure is not None:
                        raise failure
                    answers: list[Completion] | Exception = complete(asked)
                except Exception as error:  # the execution's: every episode ends with it
                    failure = answers = error
                loop.call_soon_threadsafe(_give, asked, answers)
            if failure is not None:
                raise failure
            found = playing.result()
        finally:
            playing.cancel()
        for episode in found:
            if isinstance(episode, BaseException):
                raise episode
        return [episode for episode in found if isinstance(episode, Episode)]

    def _complete(self, asked: list[_Request], sampling: Sampling, seed: int) -> list[Completion]:
        """One call of the execution, and one more for each number of tokens that a nearly full window leaves."""
        window, most = self.limits.tokens, sampling.max_new_tokens
        rooms = [most if window is None else min(most, window - len(each.prompt_ids)) for each in asked]
        completions = dict[int, Completion]()
        for room in sorted(set(rooms), reverse=True):
            chosen = [i for i, left in enumerate(rooms) if left == room]
            prompts = DataProto.from_dict(
                tensors={"sample_id": torch.tensor([asked[i].sample_id + _TURN * asked[i].turn for i in chosen])},
                non_tensors={"prompt_ids": _column([list(asked[i].prompt_ids) for i in chosen])},
            )
            width = max(len(asked[i].prompt_ids) for i in chosen)
            how = sampling.model_copy(update={"max_new_tokens": room})
            rows = self.execution.generate(prompts, how, seed=seed, prompt_width=width)
            completions |= zip(chosen, _completions(rows), strict=True)
        return [completions[i] for i in range(len(asked))]


_REPORTED: set[tuple[str, str]] = set()


def _report(path: str, episode: Episode) -> None:
    """Warn of the first failure of each cause."""
    cause = next(reversed(episode.causes), "")
    if episode.failure is not None and (path, cause) not in _REPORTED:
        _REPORTED.add((path, cause))
        warnings.warn(f"{path}: {episode.failure}. Such episodes have no score; later ones are counted", stacklevel=3)


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One for the process, in a thread of its own: environments may keep connections from episode to episode."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop


def _give(asked: list[_Request], answers: list[Completion] | Exception) -> None:
    for i, request in enumerate(asked):
        if request.future.done():
            continue
        if isinstance(answers, Exception):
            request.future.set_exception(answers)
        else:
            request.future.set_result(answers[i])


def _completions(rows: DataProto) -> list[Completion]:
    found, kept = list[Completion](), None
    for i in range(len(rows)):
        mask = rows["response_mask"][i]
        if "kept_ids" in rows:
            parts = rows["kept_ids"][i].split(rows["kept_counts"][i][mask].tolist())
            kept = [part.tolist() or None for part in parts]
        found.append(
            Completion(
                rows["responses"][i][mask].tolist(),
                rows["rollout_log_probs"][i][mask].tolist(),
                finish=Ended(int(rows["ended"][i])).label,  # type: ignore[arg-type]
                version=int(rows["weights_version"][i]),
                kept=kept,
            )
        )
    return found


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
        "failure": [episodes[i].failure for i in which],
    }
    return DataProto.from_dict(tensors=columns, non_tensors={name: _column(column) for name, column in texts.items()})


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
    """(B,): the scores without what their turns earned, so with what shaping added."""
    earned = torch.zeros_like(shaped_scores).index_add(0, trajectory_ids, turn_rewards.sum(-1))
    return shaped_scores - earned[trajectory_ids]


def same_widths(groups: Sequence[DataProto], *, pad_token_id: int) -> list[DataProto]:
    """The groups with prompts, and responses, as wide as the widest."""
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
    """Prompts with more columns on the left, responses and what is like them on the right."""
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


def _column(values: Sequence[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
