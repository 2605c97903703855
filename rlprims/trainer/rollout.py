"""Prompts to scored groups: sample, decode, verify, and the greedy baseline where the algorithm compares with it."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlprims.algorithms import Algorithm, Use, assess_groups, component_scores, shape_scores
from rlprims.data_proto import DataProto
from rlprims.execution import Execution, Sampling
from rlprims.grouping import dense_ids
from rlprims.rewards.pool import Pool
from rlprims.rewards.scoring import naive
from rlprims.trainer.config import ScoringConfig
from rlprims.trainer.data import Example


def prompt_rows(examples: Sequence[Example], groups: Sequence[int], *, copies: int, first_sample: int) -> DataProto:
    """Each example ``copies`` times, side by side; samples are numbered from ``first_sample``."""
    rows = [(example, group) for example, group in zip(examples, groups, strict=True) for _ in range(copies)]
    return DataProto.from_dict(
        tensors={
            "sample_id": torch.arange(first_sample, first_sample + len(rows)),
            "group": torch.tensor([group for _, group in rows], dtype=torch.int64),
        },
        non_tensors={
            "prompt": _column([example.prompt for example, _ in rows]),
            "prompt_ids": _column([example.prompt_ids for example, _ in rows]),
            "answer": _column([example.answer for example, _ in rows]),
            "data_source": _column([example.data_source for example, _ in rows]),
        },
    )


def _column(values: Sequence[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def respond(
    execution: Execution, tokenizer: Any, rows: DataProto, sampling: Sampling, *, seed: int, prompt_width: int
) -> DataProto:
    """The rows with a response each, as tokens and as text."""
    sampled = execution.generate(rows, sampling, seed=seed, prompt_width=prompt_width)
    tokens, mask = sampled["responses"], sampled["response_mask"]
    texts = [tokenizer.decode(row[keep], skip_special_tokens=True) for row, keep in zip(tokens, mask, strict=True)]
    return sampled.union(DataProto.from_dict(tensors={}, non_tensors={"response": _column(texts)}))


def verify(verifier: Use, rows: DataProto, scoring: ScoringConfig | None = None) -> DataProto:
    """The rows with ``scores`` and every number that the verifier returned, as columns.

    A verifier that raises, or whose score is not a number, or that a limit ended, costs that sample its score: it
    becomes NaN, and the column ``failure`` says why.
    """
    columns = {name: column.tolist() for name, column in rows.non_tensor_batch.items()}
    if scoring is not None and scoring.workers:
        scored = _pool(verifier, scoring)(columns["response"], columns["answer"], columns)
    else:
        scored = naive(verifier.fn, columns["response"], columns["answer"], columns, **dict(verifier.bound))
    for cause, example in scored.causes.items():
        if (verifier.path, cause) not in _REPORTED:
            _REPORTED.add((verifier.path, cause))
            said = columns["response"][example.first][:200]
            warnings.warn(
                f"{verifier.path} {cause}: {example.detail}; of {said!r}. Later ones are counted", stacklevel=2
            )
    failures = [failure and str(failure) for failure in scored.failures]
    tensors = {"scores": scored.scores, **scored.columns}
    return rows.union(DataProto.from_dict(tensors=tensors, non_tensors={"failure": _column(failures)}))


_REPORTED: set[tuple[str, str]] = set()
_POOLS: dict[tuple[str, ScoringConfig], Pool] = {}


def _pool(verifier: Use, scoring: ScoringConfig) -> Pool:
    """One for each verifier and its limits, for the life of the process: starting one costs seconds."""
    key = (verifier.model_dump_json(), scoring)
    if key not in _POOLS:
        _POOLS[key] = Pool(verifier.fn, dict(verifier.bound), **scoring.model_dump())
    return _POOLS[key]


def with_baseline(rows: DataProto, greedy: DataProto, copies: int) -> DataProto:
    """``baseline_scores``: the greedy response's score on each of its prompt's rows."""
    scores = greedy["scores"].repeat_interleave(copies)
    return rows.union(DataProto.from_dict(tensors={"baseline_scores": scores}))


def split_groups(algorithm: Algorithm, rows: DataProto) -> tuple[list[DataProto], list[str | None]]:
    """The rows with shaped scores, as whole groups, and for each why it is dropped or None."""
    columns = {**dict(rows.batch.items()), "group_ids": dense_ids(rows["group"])}
    made = {**component_scores(algorithm, columns), **shape_scores(algorithm, columns)}
    rows = rows.union(DataProto.from_dict(tensors=made))
    reasons = assess_groups(algorithm, {**columns, **made})
    return rows.split(algorithm.group_size), reasons[:: algorithm.group_size]
