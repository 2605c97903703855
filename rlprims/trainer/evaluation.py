"""Evaluation of the policy: one greedy response and several sampled ones to each question."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, TypeAlias

import torch

from rlprims.data_proto import DataProto
from rlprims.diagnostics import best_at_k, majority_at_k
from rlprims.ended import Ended
from rlprims.execution import Sampling
from rlprims.grouping import dense_ids
from rlprims.rewards.verifiers._numbers import last_number
from rlprims.rewards.verifiers._tags import boxed, tagged
from rlprims.trainer.data import Example
from rlprims.trainer.scoring.columns import first_rows
from rlprims.trainer.sources.group import Group, GroupSource, take_round

Vote: TypeAlias = Literal["boxed", "number", "tag", "text"]

METRIC = (
    r"greedy/acc(_low|_high)?|sampled/(pass|(acc|(pass|best|maj)@\d+)(_low|_high)?)"
    r"|(greedy|sampled)/(acc/.+|unscored|length|truncated|turns|tool_calls)"
)
"""The name of a metric of an evaluation."""

SEED_OFFSET = 2**32
"""Evaluation has its own random numbers, so that more evaluations do not change the training."""


def evaluate(
    open_source: Callable[[Sampling], GroupSource],
    examples: Sequence[Example],
    *,
    score: Callable[[DataProto], DataProto],
    sampling: Sampling,
    samples: int,
    show: Callable[[list[DataProto]], None] = lambda rows: None,
    begins: Callable[[str], None] = lambda what: None,
    vote: Vote | None = None,
) -> dict[str, float]:
    """``greedy/acc``, ``sampled/acc`` (mean of ``samples``), ``sampled/pass`` (any of them), per data source too.

    ``pass@k`` and ``best@k``, the largest score of k, are unbiased (:func:`rlprims.diagnostics.best_at_k`), for k of 2,
    4, 8, ... below ``samples``. With ``vote`` there is ``maj@k`` too, up to k of ``samples``: see
    :func:`rlprims.diagnostics.majority_at_k`. Each of these and ``acc`` has the normal 95 % interval of its mean over
    questions: ``acc_low``, ``acc_high``.

    ``score`` adds a verifier's columns to rows without scores. The accuracy is its column ``acc``, or its score; the
    other rewards of the training are not in it. A response that could not be scored counts as wrong. ``show`` is called
    with the greedy responses, and ``begins`` with what is sampled next. Environments add ``turns`` and ``tool_calls``.
    """

    def respond_to_all(copies: int, settings: Sampling) -> DataProto:
        begins(f"sampling {copies} x {len(examples)} responses at temperature {settings.temperature:g}")
        each = enumerate(examples)
        groups = [Group(i, example, range(i * copies, (i + 1) * copies)) for i, example in each]
        rows = take_round(open_source(settings), groups)
        return rows if "scores" in rows else score(rows)

    greedy_rows = respond_to_all(1, sampling.greedy())
    show([greedy_rows])
    greedy = metrics_of(greedy_rows, 1)
    sampled = metrics_of(respond_to_all(samples, sampling), samples, vote)
    metrics = {f"greedy/{k}": v for k, v in greedy.items() if not k.startswith("pass")}
    return metrics | {f"sampled/{k}": v for k, v in sampled.items()}


def metrics_of(rows: DataProto, samples: int, vote: Vote | None = None) -> dict[str, float]:
    lengths = torch.zeros(len(rows)).index_add(0, dense_ids(rows["sample_id"]), rows["response_mask"].sum(-1).float())
    rows = first_rows(rows)
    correct = rows["acc"] if "acc" in rows else rows["scores"]
    correct = torch.where(correct.isfinite(), correct, 0.0).reshape(-1, samples)
    by_source = defaultdict(list)
    for source, row in zip(rows["data_source"][::samples], correct, strict=True):
        by_source[source].append(row)
    metrics = {
        "unscored": float((~rows["scores"].isfinite()).float().mean()),
        "pass": float((correct.amax(1) > 0).float().mean()),
        "length": float(lengths[: len(rows)].mean()),
        "truncated": float((rows["ended"] == Ended.LENGTH).float().mean()),
    }
    by_question = {"acc": correct.mean(1).double()}
    one_group = torch.zeros(samples, dtype=torch.int64)
    for name, of_each in (("pass", (correct > 0).double()), ("best", correct)):
        for k in _powers_of_two(below=samples):
            by_question[f"{name}@{k}"] = torch.stack([best_at_k(x, one_group, k=k).value() for x in of_each])
    if vote is not None and samples > 1:
        answers = [answer_of(text, vote) for text in rows["response"]]
        none = torch.tensor([answer is None for answer in answers])
        questions = list(zip(dense_ids(answers).where(~none, -1).reshape(-1, samples), correct, strict=True))
        for k in [*_powers_of_two(below=samples), samples]:
            votes = [majority_at_k(ids, scores, one_group, k=k).value() for ids, scores in questions]
            by_question[f"maj@{k}"] = torch.stack(votes)
    for name, values in by_question.items():
        metrics |= {name: float(values.mean())} | _interval(name, values)
    metrics |= {name: float(rows[name].mean()) for name in ("turns", "tool_calls") if name in rows}
    if len(by_source) > 1:
        metrics |= {f"acc/{source}": float(torch.stack(part).mean()) for source, part in sorted(by_source.items())}
    return metrics


def answer_of(response: str, vote: Vote) -> Hashable | None:
    r"""The answer of a response: its last ``\boxed{}``, its last number, its last ``<answer>``, or the whole text.

    None if it has no such part.

    >>> answer_of("so 2 + 2 = 4.0", "number") == answer_of("4", "number"), answer_of("no idea", "number")
    (True, None)
    """
    if vote == "number":
        return last_number(response)
    text = boxed(response) if vote == "boxed" else tagged(response, "answer") if vote == "tag" else response
    return None if text is None else "".join(text.split())


def _powers_of_two(*, below: int) -> list[int]:
    return [2**i for i in range(1, below.bit_length()) if 2**i < below]


def _interval(name: str, of_each: torch.Tensor) -> dict[str, float]:
    """The normal 95 % interval of a mean over questions, within 0 and 1; nothing for a single one."""
    if len(of_each) < 2:
        return {}
    mean, margin = of_each.mean(), 1.96 * of_each.std() / len(of_each) ** 0.5
    return {f"{name}_low": float((mean - margin).clamp(0)), f"{name}_high": float((mean + margin).clamp(max=1))}
