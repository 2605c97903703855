"""Prompts to scored groups: sample, decode, verify, and the greedy baseline where the algorithm compares with it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlprims.algorithms import Algorithm, Use, assess_groups, shape_scores
from rlprims.data_proto import DataProto
from rlprims.execution import Execution, Sampling
from rlprims.grouping import dense_ids
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


def verify(verifier: Use, rows: DataProto) -> DataProto:
    """The rows with ``scores`` and every number that the verifier returned, as columns.

    A verifier that raises, or whose score is not a number, costs that sample its score: it becomes NaN, and the column
    ``failure`` says why.
    """
    results, failures = [], []
    options = dict(verifier.bound)
    for response, answer in zip(rows["response"], rows["answer"], strict=True):
        try:
            result = verifier.fn(response, answer, **options)
            result = dict(result) if isinstance(result, Mapping) else {"score": result}
            numbers = {name: float(value) for name, value in result.items()}
            failure = None if math.isfinite(numbers["score"]) else f"{verifier.path} returned {numbers['score']}"
        except Exception as error:
            numbers, failure = {"score": math.nan}, f"{verifier.path} raised {type(error).__name__}: {error}"
        results.append(numbers)
        failures.append(failure)
    names = sorted({name for numbers in results for name in numbers} - {"score"})
    columns = {name: torch.tensor([numbers.get(name, math.nan) for numbers in results]) for name in names}
    scores = torch.tensor([numbers["score"] for numbers in results])
    return rows.union(
        DataProto.from_dict(tensors={"scores": scores, **columns}, non_tensors={"failure": _column(failures)})
    )


def with_baseline(rows: DataProto, greedy: DataProto, copies: int) -> DataProto:
    """``baseline_scores``: the greedy response's score on each of its prompt's rows."""
    scores = greedy["scores"].repeat_interleave(copies)
    return rows.union(DataProto.from_dict(tensors={"baseline_scores": scores}))


def split_groups(algorithm: Algorithm, rows: DataProto) -> tuple[list[DataProto], list[str | None]]:
    """The rows with shaped scores, as whole groups, and for each why it is dropped or None."""
    rows = rows.union(DataProto.from_dict(tensors=shape_scores(algorithm, dict(rows.batch.items()))))
    reasons = assess_groups(algorithm, {**dict(rows.batch.items()), "group_ids": dense_ids(rows["group"])})
    return rows.split(algorithm.group_size), reasons[:: algorithm.group_size]
