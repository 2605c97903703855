"""Scores from the verifier and the rewards of a config, for the rows of a batch."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlprims.data_proto import DataProto
from rlprims.rewards._columns import wants
from rlprims.rewards.pool import Pool
from rlprims.rewards.remote import remote
from rlprims.rewards.several import Reward, Several, several
from rlprims.rewards.verifiers import check_answer, without_thinking
from rlprims.trainer.config import Config, RewardConfig, ScoringConfig

_INTERNAL = {"prompt_ids", "fields", "failure", "response", "example"}
_REPORTED: set[tuple[str, str]] = set()
_POOLS: dict[tuple[str, ScoringConfig], Pool] = {}


def call_rewards(rewards: Sequence[RewardConfig], rows: DataProto, scoring: ScoringConfig) -> Several:
    """The scores of each reward for every row. A row that fails has no score; each cause is warned of once."""
    columns = data_columns(rows)
    responses = rows["response"].tolist()
    if scoring.thinking is not None:
        opening, closing = scoring.thinking
        how: dict[str, Any] = {"opening": opening, "closing": closing, "opened": scoring.thinking_opened}
        responses = [without_thinking(text, **how) for text in responses]
    group_ids = rows["group"].tolist() if "group" in rows else None
    answers = columns.pop("answer")
    scored = several([_reward(reward, scoring) for reward in rewards], responses, answers, columns, group_ids=group_ids)
    for name, part in scored.parts.items():
        for cause, example in part.causes.items():
            if (name, cause) not in _REPORTED and (name, cause) not in _without_warning(rewards):
                _REPORTED.add((name, cause))
                text = rows["response"][example.first][:200]
                path = next(reward.path for reward in rewards if reward.column == name)
                warnings.warn(f"{path} {cause}: {example.detail}; of {text!r}. Later ones are counted", stacklevel=2)
    return scored


def _without_warning(rewards: Sequence[RewardConfig]) -> set[tuple[str, str]]:
    return {(reward.column, "returned None") for reward in rewards if reward.skips}


def data_columns(rows: DataProto) -> dict[str, list[Any]]:
    """The columns for a verifier: the fields of the data, None in rows without the field, and the trainer's texts."""
    fields = rows["fields"].tolist() if "fields" in rows else [{}] * len(rows)
    names = dict.fromkeys(name for row in fields for name in row)
    columns = {name: [row.get(name) for row in fields] for name in names}
    own = {name: column.tolist() for name, column in rows.non_tensor_batch.items() if name not in _INTERNAL}
    return columns | own


def failure_text(failures: Sequence[Any]) -> str | None:
    """The failures of a row, one per line; None if there are none."""
    return "\n".join(" ".join(str(failure).split()) for failure in failures) or None


def failure_causes(failure: str | None) -> list[str]:
    """The causes in the text of a row's failures."""
    return [line.partition(": ")[0] for line in (failure or "").splitlines()]


def answer_check(config: Config) -> Callable[[Any, str, Mapping[str, Any]], None]:
    """A function of an answer, its source and its row: it raises a ValueError if a verifier could never score it."""
    verifiers = [(r.fn, wants(r.fn.fn)) for r in config.verifiers() if r.fn is not None]

    def check(answer: Any, source: str, fields: Mapping[str, Any]) -> None:
        for verifier, wanted in verifiers:
            wanted.of({**fields, "answer": answer, "data_source": source, "prompt": "", "question": ""})
            check_answer(verifier.fn, answer, source, dict(verifier.bound))

    return check


def _reward(reward: RewardConfig, scoring: ScoringConfig) -> Reward:
    common: dict[str, Any] = {"weight": reward.weight, "name": reward.column, "skips": reward.skips}
    if reward.url is not None:
        return Reward(_server(reward, reward.url), per="scores", **common)
    assert reward.fn is not None
    if reward.workers:
        return Reward(_pool(reward, scoring), per="scores", **common)
    return Reward(
        reward.fn.fn,
        per=reward.per,
        options=dict(reward.fn.bound),
        concurrency=reward.concurrency,
        seconds=reward.seconds,
        requests_per_minute=reward.requests_per_minute,
        tokens_per_minute=reward.tokens_per_minute,
        **common,
    )


def _server(reward: RewardConfig, url: str) -> Callable[..., Any]:
    headers = {}
    if reward.key is not None:
        if reward.key not in os.environ:
            raise ValueError(f"rewards: {reward.name}: there is no environment variable {reward.key} with the key")
        headers["Authorization"] = f"Bearer {os.environ[reward.key]}"
    return partial(
        remote,
        url,
        rows_per_request=reward.rows_per_request,
        concurrency=reward.concurrency or 8,
        requests_per_second=reward.requests_per_minute and reward.requests_per_minute / 60,
        tokens_per_second=reward.tokens_per_minute and reward.tokens_per_minute / 60,
        timeout=reward.seconds or 60.0,
        deadline=reward.deadline,
        retries=reward.retries,
        headers=headers,
    )


def _pool(reward: RewardConfig, scoring: ScoringConfig) -> Pool:
    """The pool of a function with its limits. It is kept for the life of the process, as its start takes seconds."""
    assert reward.fn is not None
    scoring = scoring.model_copy(update={"workers": reward.workers})
    key = (reward.fn.model_dump_json(), scoring)
    if key not in _POOLS:
        limits = scoring.model_dump(exclude={"thinking", "thinking_opened"})
        _POOLS[key] = Pool(reward.fn.fn, dict(reward.fn.bound), **limits)
    return _POOLS[key]


def as_columns(scored: Several, *, unprefixed: str | None) -> dict[str, Tensor]:
    """The columns of a batch; those of the function ``unprefixed`` have no prefix with its name."""
    columns = dict(scored.columns)
    if unprefixed is not None and unprefixed in scored.parts:
        prefix = f"{unprefixed}/"
        columns = {name.removeprefix(prefix): column for name, column in columns.items()}
    return {name: column.to(torch.float32) for name, column in columns.items()}
