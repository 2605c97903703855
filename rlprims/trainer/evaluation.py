"""How well the policy answers: one greedy response and several sampled ones to each question."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlprims.data_proto import DataProto
from rlprims.ended import Ended
from rlprims.execution import Execution, Sampling
from rlprims.grouping import dense_ids
from rlprims.trainer.config import RewardConfig, ScoringConfig
from rlprims.trainer.data import Example
from rlprims.trainer.episodes import Player, first_rows
from rlprims.trainer.rollout import prompt_rows, respond, verify

_SEED_OFFSET = 2**32
"""Evaluation has random numbers of its own: looking more often does not change the training."""


def evaluate(
    execution: Execution,
    tokenizer: Any,
    examples: Sequence[Example],
    *,
    verifier: RewardConfig,
    scoring: ScoringConfig,
    sampling: Sampling,
    samples: int,
    seed: int,
    look: Callable[[DataProto], None] = lambda rows: None,
    player: Player | None = None,
) -> dict[str, float]:
    """``greedy/acc``, ``sampled/acc`` (mean of ``samples``), ``sampled/pass`` (any of them), per data source too.

    The accuracy is the verifier's column ``acc``, or its score, whatever else the training weighs. A response that
    could not be scored counts as wrong. ``look`` is shown the greedy responses. With a ``player`` responses are
    episodes, scored by their environment, and there are ``turns`` and ``tool_calls`` too, means by episode.
    """
    width = max(len(example.prompt_ids) for example in examples)

    def respond_to_all(copies: int, how: Sampling) -> DataProto:
        if player is not None:
            groups = range(len(examples))
            return player.play(examples, groups, how, copies=copies, first_sample=0, seed=seed + _SEED_OFFSET)[0]
        rows = prompt_rows(examples, range(len(examples)), copies=copies, first_sample=0)
        rows = respond(execution, tokenizer, rows, how, seed=seed + _SEED_OFFSET, prompt_width=width)
        return verify(verifier, rows, scoring)

    greedy_rows = respond_to_all(1, sampling.greedy())
    look(greedy_rows)
    greedy = _describe(greedy_rows, 1)
    sampled = _describe(respond_to_all(samples, sampling), samples)
    return {f"greedy/{k}": v for k, v in greedy.items() if not k.startswith("pass")} | {
        f"sampled/{k}": v for k, v in sampled.items()
    }


def _describe(rows: DataProto, samples: int) -> dict[str, float]:
    lengths = torch.zeros(len(rows)).index_add(0, dense_ids(rows["sample_id"]), rows["response_mask"].sum(-1).float())
    rows = first_rows(rows)
    right = rows["acc"] if "acc" in rows else rows["scores"]
    right = torch.where(right.isfinite(), right, 0.0).reshape(-1, samples)
    by_source = defaultdict(list)
    for source, row in zip(rows["data_source"][::samples], right, strict=True):
        by_source[source].append(row)
    metrics = {
        "acc": float(right.mean()),
        "unscored": float((~rows["scores"].isfinite()).float().mean()),
        "pass": float((right.amax(1) > 0).float().mean()),
        "length": float(lengths[: len(rows)].mean()),
        "truncated": float((rows["ended"] == Ended.LENGTH).float().mean()),
    }
    metrics |= {name: float(rows[name].mean()) for name in ("turns", "tool_calls") if name in rows}
    if len(by_source) > 1:
        metrics |= {f"acc/{source}": float(torch.stack(part).mean()) for source, part in sorted(by_source.items())}
    return metrics
