"""Recorded rollouts in place of a sampler, to try an algorithm on the same samples."""

import json
import math
from base64 import b64decode
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlprims._storage import local_copy
from rlprims.data_proto import DataProto
from rlprims.ended import Ended
from rlprims.execution import BatchStream, Models, Sampling, Stream
from rlprims.execution._columns import right_padded
from rlprims.runs.records import open_rollouts
from rlprims.trainer.sources.group import TURN


class Replay:
    """An execution whose ``generate`` returns recorded samples for the run's seed; the rest is the execution's.

    Samples are found by their ids, so the run needs the data, seed and group size of the recorded one. Evaluation has
    another seed and is sampled. With ``scores`` the recorded scores are the column ``rm_scores``. Each turn is a
    sample: the environment runs again on the recorded messages and must answer as before. ``tokenizer`` and ``end_ids``
    are for the reason why a turn ended, which is not recorded.
    """

    def __init__(
        self,
        execution: Models,
        run: Path | str,
        *,
        seed: int,
        scores: bool = False,
        tokenizer: Any = None,
        end_ids: Collection[int] = (),
    ) -> None:
        self.execution, self.run, self.seed, self.scores = execution, run, seed, scores
        self.tokenizer, self.end_ids = tokenizer, frozenset(end_ids)
        self.samples = _read(run)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.execution, name)

    def stream(self, sampling: Sampling, *, seed: int, prompt_width: int | None, over_updates: bool = False) -> Stream:
        if seed != self.seed:
            return self.execution.stream(sampling, seed=seed, prompt_width=prompt_width, over_updates=over_updates)
        generate = partial(self.generate, sampling=sampling, seed=seed, prompt_width=prompt_width)
        return BatchStream(generate, versions=over_updates)

    def generate(self, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int | None) -> DataProto:
        if seed != self.seed:
            return self.execution.generate(prompts, sampling, seed=seed, prompt_width=prompt_width)
        from rlprims.execution.hf._sampling import Responses, images_of, with_responses  # here: it loads transformers

        limit = sampling.max_new_tokens
        asked = zip(prompts["sample_id"], prompts["prompt_ids"], images_of(prompts), strict=True)
        rows = [self._row(int(i), list(ids), images) for i, ids, images in asked]
        if too_long := [row for row in rows if len(row["response_ids"]) > limit]:
            sample, count = too_long[0]["sample_id"], len(too_long[0]["response_ids"])
            raise ValueError(f"{self.run}: sample {sample} has {count} tokens, the limit is {limit}")
        responses, mask = right_padded([row["response_ids"] for row in rows], limit, self.pad_token_id)
        sampled = [log_prob for row in rows for log_prob in row["rollout_log_probs"]]
        log_probs = torch.zeros(mask.shape).masked_scatter(mask, torch.tensor(sampled, dtype=torch.float32))
        sets = [ids for row in rows for ids in row.get("kept") or [[]] * len(row["response_ids"])]
        counts = torch.tensor([len(ids) for ids in sets], dtype=torch.int32)
        kept: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
        if any("kept" in row for row in rows):
            kept_ids = torch.tensor([token for ids in sets for token in ids], dtype=torch.int32)
            kept = kept_ids, torch.zeros(mask.shape, dtype=torch.int32).masked_scatter(mask, counts)
        ended = torch.tensor([self._end_reason(row, sampling) for row in rows], dtype=torch.int8)
        found = Responses(responses, mask, log_probs, ended, *kept)
        recorded = with_responses(prompts, found, prompt_width=prompt_width, pad_token_id=self.pad_token_id)
        versions = [int(row.get("weights_version", self.weights_version)) for row in rows]
        recorded["weights_version"] = torch.tensor(versions)
        if self.scores:
            scores = [row.get("score") for row in rows]
            recorded["rm_scores"] = torch.tensor([math.nan if score is None else float(score) for score in scores])
        return recorded

    def _row(self, sample_id: int, prompt_ids: list[int], images: tuple[bytes, ...]) -> dict[str, Any]:
        row = self.samples.get(sample_id)
        turn, number = divmod(sample_id, TURN)
        name = f"turn {turn} of sample {number}" if turn else f"sample {number}"
        if row is None:
            raise ValueError(
                f"{self.run} has no {name} ({len(self.samples)} are recorded): replay fewer steps, or with the group "
                "size, batch sizes, filter and limits that were recorded"
            )
        other = "prompt" if row["prompt_ids"] != prompt_ids else ""
        if other or row["images"][: len(images)] != list(map(hash, images)):  # a row may have those of later turns
            remedy = "an environment must answer as before" if turn else "use the same data and seed"
            raise ValueError(f"{self.run}: {name} answers another {other or 'image'}: {remedy}")
        return row

    def _end_reason(self, row: dict[str, Any], sampling: Sampling) -> Ended:
        if "ended" in row:
            return Ended.from_label(row["ended"])
        ids: list[int] = row["response_ids"]
        if ids[-1] in self.end_ids or any(text in self.tokenizer.decode(ids) for text in sampling.stop):
            return Ended.STOP
        return Ended.LENGTH if len(ids) == sampling.max_new_tokens else Ended.CONTEXT


def _read(run: Path | str) -> dict[int, dict[str, Any]]:
    files = sorted(Path(local_copy(f"{run}/rollouts")).glob("step_*.jsonl*"))
    if not files:
        needs = "it needs rollouts/step_*.jsonl, of a run with record_rollouts"
        raise ValueError(f"{run} has no recorded rollouts: {needs}")
    samples = dict[int, dict[str, Any]]()
    for file in files:
        images = dict[Any, list[int]]()  # their hashes, by group
        with open_rollouts(file) as opened:
            lines = opened.read().decode().split("\n")
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                row = json.loads(line)
                if "images" in row:
                    images[row["group"]] = [hash(b64decode(image)) for image in row["images"]]
                row["images"] = images.get(row.get("group"), [])
                samples |= dict(_turns(row)) if "turn_ids" in row else {int(row["sample_id"]): row}
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file}:{number}: not a recorded sample: {error}") from None
    return samples


def _turns(row: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The turns of a row as samples, by number, each with its prompt and its sampled tokens."""
    ids, turns = row["response_ids"], row["turn_ids"]
    places: dict[int, list[int]] = {}
    for place, (turn, observed) in enumerate(zip(turns, row["observation"], strict=True)):
        if not observed:
            places.setdefault(turn, []).append(place)
    for turn, own in places.items():
        part = slice(own[0], own[-1] + 1)
        names = ["response_ids", "rollout_log_probs", *(["kept"] if "kept" in row else [])]
        columns: dict[str, Any] = {name: row[name][part] for name in names}
        columns |= {name: row[name] for name in ("sample_id", "weights_version", "images")}
        yield int(row["sample_id"]) + TURN * turn, columns | {"prompt_ids": row["prompt_ids"] + ids[: own[0]]}
