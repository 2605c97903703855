"""From prompts to scored groups: sample, decode and score; and the scores of greedy responses as baselines."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlprims.algorithms import (
    Algorithm,
    component_scores,
    fill_invalid_scores,
    filter_groups,
    leave_out_rows,
    shape_scores,
)
from rlprims.data_proto import DataProto
from rlprims.execution import Execution, RewardScorer, Sampling, kept_columns
from rlprims.grouping import dense_ids
from rlprims.layout import sequence_sum
from rlprims.rewards import combine
from rlprims.rewards.scoring import Failure
from rlprims.trainer.collect.episodes import first_rows, rollout_ids, same_widths
from rlprims.trainer.collect.rewarding import as_columns, call_rewards, failure_text
from rlprims.trainer.config import Config, RewardConfig, ScoringConfig
from rlprims.trainer.data import Example


def prompt_rows(examples: Sequence[Example], groups: Sequence[int], *, copies: int, first_sample: int) -> DataProto:
    """The rows of prompts, each example ``copies`` times in a row; samples are numbered from ``first_sample``."""
    rows = [(example, group) for example, group in zip(examples, groups, strict=True) for _ in range(copies)]
    return DataProto.from_dict(
        tensors={
            "sample_id": torch.arange(first_sample, first_sample + len(rows)),
            "group": torch.tensor([group for _, group in rows], dtype=torch.int64),
        },
        non_tensors={
            "prompt": [example.prompt for example, _ in rows],
            "question": [example.question for example, _ in rows],
            "prompt_ids": [example.prompt_ids for example, _ in rows],
            "answer": [example.answer for example, _ in rows],
            "data_source": [example.data_source for example, _ in rows],
            "fields": [example.fields for example, _ in rows],
            "example": [example.key for example, _ in rows],
        },
    )


def respond(
    execution: Execution, tokenizer: Any, rows: DataProto, sampling: Sampling, *, seed: int, prompt_width: int
) -> DataProto:
    """The rows with a response each, as tokens and as text."""
    return with_texts(tokenizer, execution.generate(rows, sampling, seed=seed, prompt_width=prompt_width))


def with_texts(tokenizer: Any, sampled: DataProto) -> DataProto:
    """The rows with their responses as text."""
    tokens, mask = sampled["responses"], sampled["response_mask"]
    texts = [tokenizer.decode(row[keep], skip_special_tokens=True) for row, keep in zip(tokens, mask, strict=True)]
    return sampled.union(DataProto.from_dict(tensors={}, non_tensors={"response": texts}))


def score(scorer: RewardScorer, config: Config, rows: DataProto) -> DataProto:
    """The rows with the columns of :func:`verify`, and ``scores``, the weighted sum of verifier and reward model.

    If there are ``rm_scores``, (B,) or (B, T), these are the scores; the verifier runs only on rows where they are NaN.
    """
    known = _known_scores(rows)
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


def _known_scores(rows: DataProto) -> Tensor:
    if "rm_scores" not in rows:
        return torch.full((len(rows),), torch.nan)
    given: Tensor = rows["rm_scores"].float()
    return given if given.dim() == 1 else sequence_sum(given, rows["response_mask"])


def _verifier_and_reward_model(scorer: RewardScorer, config: Config, rows: DataProto) -> DataProto:
    """The weighted sum; NaN if a source with a weight could not score the row.

    A column that the verifier did not return counts as 0.
    """
    if not config.score_parts:
        return verify(config.evaluation_verifier, rows, config.scoring)
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
    scores = combine(torch.stack([known[name] for name in weights], 1), weights=tuple(weights.values()))
    for name in failed.keys() & weights.keys():
        scores = torch.where(failed[name], torch.nan, scores)
    texts = {"failure": [failure_text(row) for row in failures]}
    return rows.union(DataProto.from_dict(tensors={**columns, "scores": scores}, non_tensors=texts))


def verify(verifier: RewardConfig, rows: DataProto, scoring: ScoringConfig) -> DataProto:
    """The rows with ``scores`` and every number that the verifier returned, as columns.

    If the verifier raises, returns no number, or reaches a limit, the score of that sample is NaN, and the column
    ``failure`` has the reason.
    """
    by_reward = call_rewards([verifier], rows, scoring)
    columns = as_columns(by_reward, unprefixed=verifier.column)
    part = by_reward.parts[verifier.column]
    columns = {name: column for name, column in columns.items() if name != verifier.column} | {"scores": part.scores}
    texts = {"failure": [failure and failure_text([failure]) for failure in part.failures]}
    return rows.union(DataProto.from_dict(tensors=columns, non_tensors=texts))


def with_baseline_scores(rows: DataProto, greedy: DataProto) -> DataProto:
    """The rows with ``baseline_scores``, the score of their prompt's greedy response."""
    scores = first_rows(greedy)["scores"][dense_ids(rows["group"])]
    return rows.union(DataProto.from_dict(tensors={"baseline_scores": scores}))


def split_groups(
    algorithm: Algorithm, rows: DataProto, *, leave_out: bool = False
) -> tuple[list[DataProto], list[str | None]]:
    """The rows with shaped scores, split into groups, and for each group the reason to drop it, or None.

    With ``leave_out`` a row without a score does not drop its group: it is False in ``valid_rows``, like the rows that
    ``algorithm.ended`` leaves out, and the filter reads the mean of the group's other rows for it.
    """
    columns = {name: column for name, column in rows.batch.items() if name != "kept_ids"}  # kept_ids is ragged
    columns |= rollout_ids(rows)
    added: dict[str, Tensor] = {}
    if "baseline_scores" in columns:  # without a baseline the row has no advantage
        columns["scores"] = torch.where(columns["baseline_scores"].isfinite(), columns["scores"], torch.nan)
    if leave_out:
        added["valid_rows"] = columns["scores"].isfinite()
    added |= leave_out_rows(algorithm, {**columns, **added})
    columns = fill_invalid_scores(algorithm, {**columns, **added})
    added |= {**component_scores(algorithm, columns), **shape_scores(algorithm, columns)}
    reasons = filter_groups(algorithm, {**columns, **added})
    rows = rows.union(DataProto.from_dict(tensors=added))
    sizes = columns["group_ids"].bincount().tolist()  # in rows: an episode may have several
    ends = list(accumulate(sizes))
    return [rows[end - size : end] for size, end in zip(sizes, ends, strict=True)], [reasons[end - 1] for end in ends]


def join_groups(groups: Sequence[DataProto], *, pad_token_id: int = 0) -> DataProto:
    """The groups as one batch, padded to the widest. A column of the verifier that a group lacks is NaN there.

    A group without kept sets was sampled without truncation, so its sets are the whole vocabulary.
    """
    if any("turn_rewards" in group for group in groups):
        groups = same_widths(groups, pad_token_id=pad_token_id)
    names = {name: column.dtype for group in groups for name, column in group.batch.items() if column.dim() == 1}
    truncated = any("kept_ids" in group for group in groups)
    parts = []
    for group in groups:
        missing = {n: torch.full((len(group),), torch.nan, dtype=t) for n, t in names.items() if n not in group}
        if truncated and "kept_ids" not in group:
            missing |= kept_columns(torch.zeros(0), torch.zeros(group["response_mask"].shape))
        parts.append(group.union(DataProto.from_dict(tensors=missing)) if missing else group)
    return DataProto.concat(parts)
