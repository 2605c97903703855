"""Scores from the verifier, the rewards and the reward model of a config, for the rows of a batch."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlprims.data_proto import DataProto
from rlprims.execution import RewardScorer
from rlprims.layout import sequence_sum
from rlprims.rewards import weighted_score
from rlprims.rewards._columns import wants
from rlprims.rewards.pool import Pool
from rlprims.rewards.scoring import Failure
from rlprims.rewards.several import Reward, Several, several
from rlprims.rewards.verifiers import check_answer, without_thinking
from rlprims.trainer.scoring.settings import RewardConfig, ScoringConfig, ScoringSettings

_INTERNAL = {"prompt_ids", "fields", "failure", "response", "example"}
_REPORTED: set[tuple[str, str]] = set()
_POOLS: dict[tuple[str, ScoringConfig], Pool] = {}


def score(scorer: RewardScorer, config: ScoringSettings, rows: DataProto) -> DataProto:
    """The rows with the columns of :func:`verify`, and ``scores``, the weighted sum of verifier and reward model.

    If there are ``rm_scores``, (B,) or (B, T), these are the scores; the verifier runs only on rows where they are NaN.
    """
    known = rows["rm_scores"].float() if "rm_scores" in rows else torch.full((len(rows),), torch.nan)
    known = known if known.dim() == 1 else sequence_sum(known, rows["response_mask"])
    unknown = known.isnan()
    if unknown.all():
        return _verifier_and_reward_model(scorer, config, rows)
    tensors, failures = {"scores": known}, np.full(len(rows), None, dtype=object)
    if unknown.any():
        scored = _verifier_and_reward_model(scorer, config, rows[unknown])
        failures[unknown.numpy()] = scored["failure"]
        for name in scored.batch.keys() - rows.batch.keys():
            tensors[name] = tensors.get(name, torch.full_like(known, torch.nan)).masked_scatter(unknown, scored[name])
    return rows.union(DataProto.from_dict(tensors=tensors, non_tensors={"failure": failures}))


def _verifier_and_reward_model(scorer: RewardScorer, config: ScoringSettings, rows: DataProto) -> DataProto:
    """The weighted sum; NaN if a source with a weight could not score the row. An absent number counts as 0."""
    if not config.score_parts:
        return verify(config.verifiers()[0], rows, config.scoring)
    verifiers = config.verifiers()
    by_reward = call_rewards(verifiers, rows, config.scoring)
    columns = as_columns(by_reward, unprefixed="verifier_scores")
    failed = {name: ~part.scores.isfinite() for name, part in by_reward.parts.items()}
    for reward in verifiers:
        if reward.skips:  # None means that the reward does not apply to the row
            applies = [f is None or f.cause != "returned None" for f in by_reward.parts[reward.column].failures]
            failed[reward.column] &= torch.tensor(applies, dtype=torch.bool)
    failures = [[f._replace(cause=f.cause.removeprefix("verifier_scores ")) for f in row] for row in by_reward.failures]
    if config.model.reward is not None:
        columns["reward_model_scores"] = read = scorer.reward_scores(rows)
        failed["reward_model_scores"] = ~read.isfinite()
        unread = Failure("no reward model score", "the text is longer than its window, or the score is not finite")
        failures = [[*row, *[unread] * (not ok)] for row, ok in zip(failures, read.isfinite().tolist(), strict=True)]
    weights = config.weights
    if missing := sorted(set(weights) - set(columns) - set(rows.batch.keys())):
        raise ValueError(f"score_weights names {missing}; the columns are {sorted({*columns, *rows.batch.keys()})}")
    known = {**rows.batch, **columns}
    scores = weighted_score(torch.stack([known[name] for name in weights], 1), weights=tuple(weights.values()))
    for name in failed.keys() & weights.keys():
        scores = torch.where(failed[name], torch.nan, scores)
    texts = {"failure": [failure_text(row) for row in failures]}
    return rows.union(DataProto.from_dict(tensors={**columns, "scores": scores}, non_tensors=texts))


def verify(verifier: RewardConfig, rows: DataProto, scoring: ScoringConfig) -> DataProto:
    """The rows with ``scores`` and every number that the verifier returned; NaN and ``failure`` where it failed."""
    by_reward = call_rewards([verifier], rows, scoring)
    columns = as_columns(by_reward, unprefixed=verifier.column)
    part = by_reward.parts[verifier.column]
    columns = {name: column for name, column in columns.items() if name != verifier.column} | {"scores": part.scores}
    texts = {"failure": [failure and failure_text([failure]) for failure in part.failures]}
    return rows.union(DataProto.from_dict(tensors=columns, non_tensors=texts))


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
            reward = next(reward for reward in rewards if reward.column == name)
            if (name, cause) not in _REPORTED and not (reward.skips and cause == "returned None"):
                _REPORTED.add((name, cause))
                what = f"{example.detail}; of {rows['response'][example.first][:200]!r}"
                warnings.warn(f"{reward.fn.path} {cause}: {what}. Later ones are counted", stacklevel=2)
    return scored


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


def answer_check(verifiers: Sequence[RewardConfig]) -> Callable[[Any, str, Mapping[str, Any]], None]:
    """A function of an answer, its source and its row: it raises a ValueError if a verifier could never score it."""
    functions = [(r.fn, wants(r.fn.fn)) for r in verifiers]

    def check(answer: Any, source: str, fields: Mapping[str, Any]) -> None:
        for verifier, wanted in functions:
            wanted.names_in({**fields, "answer": answer, "data_source": source, "prompt": "", "question": ""})
            check_answer(verifier.fn, answer, source, dict(verifier.bound))

    return check


def _reward(reward: RewardConfig, scoring: ScoringConfig) -> Reward:
    common: dict[str, Any] = {"weight": reward.weight, "name": reward.column, "skips": reward.skips}
    if reward.workers:
        return Reward(_pool(reward, scoring), per="scores", **common)
    common |= {name: getattr(reward, name) for name in ("per", "concurrency", "seconds")}
    common |= {name: getattr(reward, name) for name in ("requests_per_minute", "tokens_per_minute")}
    return Reward(reward.fn.fn, options=dict(reward.fn.bound), **common)


def _pool(reward: RewardConfig, scoring: ScoringConfig) -> Pool:
    """The pool of a function with its limits. It is kept for the life of the process, as its start takes seconds."""
    scoring = scoring.model_copy(update={"workers": reward.workers})
    key = (reward.fn.model_dump_json(), scoring)
    if key not in _POOLS:
        limits = scoring.model_dump(exclude={"thinking", "thinking_opened"})
        _POOLS[key] = Pool(reward.fn.fn, dict(reward.fn.bound), **limits)
    return _POOLS[key]


def as_columns(scored: Several, *, unprefixed: str | None) -> dict[str, Tensor]:
    """The columns of a batch; those of the function ``unprefixed`` have no prefix with its name."""
    prefix = f"{unprefixed}/" if unprefixed in scored.parts else ""
    return {name.removeprefix(prefix): column.to(torch.float32) for name, column in scored.columns.items()}
