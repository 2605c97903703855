"""Recorded rollouts instead of a sampler, to try an algorithm on the same samples."""

import json
import math
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlprims.algorithms import Algorithm
from rlprims.data_proto import DataProto
from rlprims.ended import Ended
from rlprims.execution import BatchStream, Execution, Finish, Sampling, Stream, UpdateReport, kept_columns
from rlprims.reports._rollout_rows import open_rollouts
from rlprims.trainer.collect.episodes import TURN


class Replay:
    """An execution whose ``generate`` returns recorded samples for the run's own seed; the rest is passed on.

    Samples are found by their ids, so the run must ask in the recorded order: same data, seed and group size.
    Evaluation has another seed and is sampled. With ``scores`` the recorded scores are the column ``rm_scores``.

    Of episodes each turn is a sample: the environment runs again, reads the recorded messages, and must answer as it
    did. A recording does not say why a turn ended; ``tokenizer`` and ``end_ids`` do.
    """

    def __init__(
        self,
        execution: Execution,
        run: Path,
        *,
        seed: int,
        scores: bool = False,
        tokenizer: Any = None,
        end_ids: Collection[int] = (),
    ) -> None:
        self.execution = execution
        self.run = run
        self.seed = seed
        self.scores = scores
        self.tokenizer, self.end_ids = tokenizer, frozenset(end_ids)
        self.pad_token_id = execution.pad_token_id
        self.context_window = execution.context_window
        self.overlaps = execution.overlaps
        self.samples = _read(run)

    @property
    def weights_version(self) -> int:
        return self.execution.weights_version

    def stream(self, sampling: Sampling, *, seed: int, prompt_width: int, over_updates: bool = False) -> Stream:
        if seed != self.seed:
            return self.execution.stream(sampling, seed=seed, prompt_width=prompt_width, over_updates=over_updates)
        generate = partial(self.generate, sampling=sampling, seed=seed, prompt_width=prompt_width)
        return BatchStream(generate, versions=over_updates)

    def generate(self, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int) -> DataProto:
        if seed != self.seed:
            return self.execution.generate(prompts, sampling, seed=seed, prompt_width=prompt_width)
        limit = sampling.max_new_tokens
        rows = [
            self._row(int(i), list(ids)) for i, ids in zip(prompts["sample_id"], prompts["prompt_ids"], strict=True)
        ]
        size = len(rows)
        padded = torch.full((size, prompt_width), self.pad_token_id)
        responses = torch.full((size, limit), self.pad_token_id)
        attention = torch.zeros(size, prompt_width + limit, dtype=torch.bool)
        log_probs = torch.zeros(size, limit)
        kept_ids, kept_counts = list[int](), torch.zeros(size, limit, dtype=torch.int32)
        for i, row in enumerate(rows):
            prompt, response = row["prompt_ids"], row["response_ids"]
            if len(response) > limit:
                raise ValueError(
                    f"{self.run}: sample {row['sample_id']} has {len(response)} tokens, the limit is {limit}"
                )
            padded[i, prompt_width - len(prompt) :] = torch.tensor(prompt)
            responses[i, : len(response)] = torch.tensor(response)
            attention[i, prompt_width - len(prompt) : prompt_width + len(response)] = True
            log_probs[i, : len(response)] = torch.tensor(row["rollout_log_probs"])
            sets = row.get("kept") or [[]] * len(response)
            kept_counts[i, : len(response)] = torch.tensor([len(ids) for ids in sets])
            kept_ids += [token for ids in sets for token in ids]
        recorded = DataProto.from_dict(
            tensors={
                "prompts": padded,
                "responses": responses,
                "attention_mask": attention,
                "response_mask": attention[:, prompt_width:].clone(),
                "rollout_log_probs": log_probs,
                "ended": torch.tensor([self._end(row, sampling) for row in rows], dtype=torch.int8),
                "weights_version": torch.tensor(
                    [int(row.get("weights_version", self.weights_version)) for row in rows]
                ),
            }
        )
        if any("kept" in row for row in rows):
            recorded = recorded.union(DataProto.from_dict(kept_columns(torch.tensor(kept_ids), kept_counts)))
        if self.scores:
            recorded["rm_scores"] = torch.tensor([_score(row) for row in rows])
        return prompts.union(recorded)

    def log_probs(self, batch: DataProto, *, reference: bool = False) -> Tensor:
        return self.execution.log_probs(batch, reference=reference)

    def teacher_log_probs(self, batch: DataProto) -> Tensor:
        return self.execution.teacher_log_probs(batch)

    def top_tokens(self, batch: DataProto, size: int) -> Tensor:
        return self.execution.top_tokens(batch, size)

    def teacher_top(self, batch: DataProto, size: int) -> DataProto:
        return self.execution.teacher_top(batch, size)

    def entropies(self, batch: DataProto) -> Tensor:
        return self.execution.entropies(batch)

    def values(self, batch: DataProto) -> Tensor:
        return self.execution.values(batch)

    def reward_scores(self, batch: DataProto) -> Tensor:
        return self.execution.reward_scores(batch)

    def update(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        return self.execution.update(batch, algorithm)

    def update_critic(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        return self.execution.update_critic(batch, algorithm)

    def sync_weights(self) -> None:
        self.execution.sync_weights()

    def close(self) -> None:
        self.execution.close()

    def save(self, directory: Path) -> Finish:
        return self.execution.save(directory)

    def load(self, directory: Path) -> None:
        self.execution.load(directory)

    def _row(self, sample_id: int, prompt_ids: list[int]) -> dict[str, Any]:
        row = self.samples.get(sample_id)
        turn, number = divmod(sample_id, TURN)
        name = f"turn {turn} of sample {number}" if turn else f"sample {number}"
        if row is None:
            raise ValueError(
                f"{self.run} has no {name} ({len(self.samples)} are recorded): replay fewer steps, or with the group "
                "size, batch sizes, filter and limits that were recorded"
            )
        if row["prompt_ids"] != prompt_ids:
            mend = "an environment must answer as it did" if turn else "use the same data and seed"
            raise ValueError(f"{self.run}: {name} answers another prompt: {mend}")
        return row

    def _end(self, row: dict[str, Any], sampling: Sampling) -> Ended:
        if "ended" in row:
            return Ended.of(row["ended"])
        ids: list[int] = row["response_ids"]
        if ids[-1] in self.end_ids or any(text in self.tokenizer.decode(ids) for text in sampling.stop):
            return Ended.STOP
        return Ended.LENGTH if len(ids) == sampling.max_new_tokens else Ended.CONTEXT


def _score(row: dict[str, Any]) -> float:
    """NaN where none is recorded."""
    score = row.get("score")
    return math.nan if score is None else float(score)


def _read(run: Path) -> dict[int, dict[str, Any]]:
    files = sorted((run / "rollouts").glob("step_*.jsonl*"))
    if not files:
        raise ValueError(
            f"{run} has no recorded rollouts: it needs rollouts/step_*.jsonl, of a run with record_rollouts"
        )
    samples = dict[int, dict[str, Any]]()
    for file in files:
        with open_rollouts(file) as opened:
            lines = opened.read().decode().split("\n")
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                row = json.loads(line)
                samples |= dict(_turns(row)) if "turn_ids" in row else {int(row["sample_id"]): row}
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file}:{number}: not a recorded sample: {error}") from None
    return samples


def _turns(row: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each turn of a row of an episode as a sample of its own, by its number: what it read, and what it sampled."""
    ids, turns = row["response_ids"], row["turn_ids"]
    places: dict[int, list[int]] = {}
    for place, (turn, observed) in enumerate(zip(turns, row["observation"], strict=True)):
        if not observed:
            places.setdefault(turn, []).append(place)
    for turn, own in places.items():
        part = slice(own[0], own[-1] + 1)
        names = ["response_ids", "rollout_log_probs", *(["kept"] if "kept" in row else [])]
        columns: dict[str, Any] = {name: row[name][part] for name in names}
        yield (
            int(row["sample_id"]) + TURN * turn,
            {
                "sample_id": row["sample_id"],
                "prompt_ids": row["prompt_ids"] + ids[: own[0]],
                "weights_version": row["weights_version"],
                **columns,
            },
        )
