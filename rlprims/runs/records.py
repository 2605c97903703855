"""Recorded rollouts, read back from a run directory."""

import base64
import gzip
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from rlprims._json import finite_number
from rlprims.data_proto import DataProto
from rlprims.ended import Ended
from rlprims.grouping import rows_by_label

_FILE = re.compile(r"step_(\d+)\.jsonl(\.gz)?")


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """One recorded response. Fields that its line does not have are empty or None.

    Attributes:
        tokens: the text of each response token; one text, the whole response, if tokens were not recorded.
        log_probs: the sampler's, one for each token, or empty.
        old_log_probs: the trainer's before the step's updates, one for each token, or empty.
        advantages: one for each token, or None if the row was not trained on.
        status: ``trained``, or the reason why it was not.
        columns: the verifier's other columns, such as ``acc``.
        turn_ids: of an episode, the turn of each token; empty for a single response.
        observed: of an episode, whether each token was read and not sampled.
        turn_rewards: the reward of each turn, by its number.
        images: of the row, in base64; None if they are those of the row before in its group, or there are none.
    """

    step: int
    group: int | None
    sample_id: int | None
    prompt: str
    response: str
    answer: str
    data_source: str
    score: float | None
    shaped_score: float | None
    baseline_score: float | None
    status: str
    ended: str
    tokens: list[str]
    log_probs: list[float | None]
    advantages: list[float | None] | None
    prompt_ids: list[int] = field(repr=False)
    response_ids: list[int] = field(repr=False)
    old_log_probs: list[float | None] = field(default_factory=list, repr=False)
    columns: dict[str, Any] = field(default_factory=dict)
    turn_ids: list[int] = field(default_factory=list)
    observed: list[bool] = field(default_factory=list)
    turn_rewards: dict[int, float] = field(default_factory=dict)
    images: list[str] | None = field(default=None, repr=False)

    @property
    def is_left_out(self) -> bool:
        return self.status not in ("trained", "")

    @property
    def outcome(self) -> str:
        """The status in words, with \"not trained\" if it says only why."""
        bare = self.is_left_out and not self.status.startswith("dropped")
        return f"not trained: {self.status}" if bare else self.status


def recorded_steps(run: Path) -> dict[int, Path]:
    """The recorded steps in ascending order, each with its file."""
    found = ((_FILE.fullmatch(path.name), path) for path in (Path(run) / "rollouts").glob("step_*"))
    steps = {int(match[1]): path for match, path in found if match}
    if not steps:
        files = "rollouts/step_000001.jsonl and so on"
        raise ValueError(f"{run} has no recorded rollouts ({files}): pass the directory of a run that records rollouts")
    return dict(sorted(steps.items()))


def read_rollouts(run: Path, step: int | None = None) -> list[RecordedRow]:
    """The rows of one recorded step, the last by default, in the order in which they were written.

    Raises:
        ValueError: nothing was recorded, or not at that step; or a line is damaged. The message has file and line.
    """
    chosen = max(recorded_steps(run)) if step is None else step
    path = file_of(run, chosen)
    rows = []
    for at, row in parsed(path, chosen):
        if isinstance(row, ValueError):
            raise ValueError(f"{path}, line {at}: {row}; remove the line or choose another step") from row
        rows.append(row)
    return rows


def file_of(run: Path, step: int) -> Path:
    """The file of a recorded step."""
    steps = recorded_steps(run)
    if step not in steps:
        shown = list(map(str, steps))
        shown = shown if len(shown) <= 8 else [*shown[:3], "…", *shown[-3:]]
        raise ValueError(f"{run} has no rollouts of step {step}; it has those of {', '.join(shown)}")
    return steps[step]


def open_rollouts(path: Path, mode: str = "rb") -> IO[bytes]:
    """A file of recorded rollouts, compressed if its name ends in ``.gz``."""
    return cast("IO[bytes]", gzip.open(path, mode, compresslevel=3) if path.suffix == ".gz" else path.open(mode))


def parsed(path: Path, step: int) -> Iterator[tuple[int, RecordedRow | ValueError]]:
    """The lines' numbers, each with its row or the error in it."""
    with open_rollouts(path) as lines:
        for at, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield at, row_of(json.loads(line, parse_constant=lambda _: None), step)
                except (ValueError, OverflowError) as error:
                    yield at, ValueError(str(error))


def by_group(rows: Sequence[RecordedRow]) -> list[list[RecordedRow]]:
    """The rows by group, groups in order of appearance. A row without a group is a group of its own."""
    labels = [("alone", at) if row.group is None else row.group for at, row in enumerate(rows)]
    return [[rows[at] for at in own] for own in rows_by_label(labels)]


def row_of(record: Any, step: int) -> RecordedRow:
    if not isinstance(record, dict):
        raise ValueError("expected a JSON object")
    text = {key: str(record.pop(key, None) or "") for key in ("prompt", "response", "data_source", "status")}
    answer = record.pop("answer", None)
    tokens = record.pop("response_tokens", None)
    tokens = [text["response"]] if tokens is None else _list(tokens, "response_tokens")
    per_token = {key: record.pop(key, None) for key in ("rollout_log_probs", "old_log_probs", "advantages")}
    per_token |= {key: record.pop(key, None) or None for key in ("turn_ids", "observation")}
    for key, values in per_token.items():
        if values is not None and len(_list(values, key)) != len(tokens):
            raise ValueError(f"{key} has {len(values)} entries for {len(tokens)} response tokens")
    earned = record.pop("turn_rewards", None) or {}
    if not isinstance(earned, dict):
        raise ValueError("turn_rewards is no object")
    images = record.pop("images", None)
    record.pop("kept", None)  # too many ids to show; only a replay reads them
    advantages, truncated = per_token["advantages"], record.pop("truncated", None)
    ended = "" if truncated is None else "length" if truncated else "stop"  # in records without ``ended``
    return RecordedRow(
        **text,
        step=step,
        group=_int(record.pop("group", None)),
        sample_id=_int(record.pop("sample_id", None)),
        answer="" if answer is None else str(answer),
        score=finite_number(record.pop("score", None)),
        shaped_score=finite_number(record.pop("shaped_scores", None)),
        baseline_score=finite_number(record.pop("baseline_scores", record.pop("baseline_score", None))),
        ended=str(record.pop("ended", None) or ended),
        tokens=[str(token) for token in tokens],
        log_probs=[finite_number(value) for value in per_token["rollout_log_probs"] or []],
        advantages=None if advantages is None else [finite_number(value) for value in advantages],
        prompt_ids=_list(record.pop("prompt_ids", None) or [], "prompt_ids"),
        response_ids=_list(record.pop("response_ids", None) or [], "response_ids"),
        old_log_probs=[finite_number(value) for value in per_token["old_log_probs"] or []],
        columns={key.removeprefix(_OTHER): value for key, value in record.items() if key != "step"},
        turn_ids=[int(turn) for turn in per_token["turn_ids"] or []],
        observed=[bool(read) for read in per_token["observation"] or []],
        turn_rewards={int(turn): float(reward) for turn, reward in earned.items()},
        images=None if images is None else [str(image) for image in _list(images, "images")],
    )


def _list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{key} is no list")
    return value


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) else None


_TEXTS = ("prompt", "response", "answer", "data_source", "failure")
_INTERNAL = {"sample_id", "group", "group_ids", "trajectory_ids", "ended"}
_OTHER = "columns/"
"""The beginning of a recorded column whose name is that of a field of its own, such as a verifier's ``status``."""
_FIELDS = {
    *("step", "score", "status", "truncated", "prompt_ids", "response_ids", "response_tokens", "rollout_log_probs"),
    *("old_log_probs", "advantages", "kept", "turn_ids", "observation", "turn_rewards", "images", *_TEXTS, *_INTERNAL),
}


def record_lines(step: int, rows: DataProto, status: str, text_of: Callable[[int], str]) -> Iterable[dict[str, Any]]:
    numbers = [name for name, column in rows.batch.items() if column.dim() == 1 and name not in _INTERNAL]
    images, known = rows.non_tensor_batch.get("images"), dict[int, Any]()
    for i in range(len(rows)):
        mask = rows["attention_mask"][i][rows["prompts"].shape[1] :]  # in an episode also the tokens that it read
        ids = rows["responses"][i][mask].tolist()
        old = {"old_log_probs": rows["old_log_probs"][i][mask].tolist()} if "old_log_probs" in rows else {}
        advantages = None
        if "advantages" in rows:  # tokens that were read have none
            each = zip(rows["advantages"][i][mask].tolist(), rows["response_mask"][i][mask].tolist(), strict=True)
            advantages = [a if own else None for a, own in each]
        kept = {}
        if "kept_ids" in rows:  # for each response token the ids that it was drawn from; none: the whole vocabulary
            sets = rows["kept_ids"][i].split(rows["kept_counts"][i][mask].tolist())
            kept = {"kept": [ids.tolist() for ids in sets]}
        values = {name: float(rows[name][i]) for name in numbers}
        group, shown = int(rows["group"][i]), {}
        if images is not None and known.get(group) != images[i]:
            known[group] = images[i]
            shown["images"] = [base64.b64encode(image).decode() for image in images[i]]
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        yield {
            "step": step,
            "sample_id": int(rows["sample_id"][i]),
            "group": group,
            **{name: rows[name][i] for name in _TEXTS},
            "score": finite.pop("scores"),
            **{_OTHER * (name in _FIELDS) + name: value for name, value in finite.items()},
            "status": status,
            "ended": Ended(int(rows["ended"][i])).label,
            "prompt_ids": list(rows["prompt_ids"][i]),
            "response_ids": ids,
            "response_tokens": [text_of(token) for token in ids],
            "rollout_log_probs": rows["rollout_log_probs"][i][mask].tolist(),
            **old,
            "advantages": advantages,
            **kept,
            **shown,
            **(_turns(rows, i, mask) if "turn_rewards" in rows else {}),
        }


def _turns(rows: DataProto, i: int, mask: Tensor) -> dict[str, Any]:
    """The turn of each token, the tokens that were read, and the reward of each turn. The last has the outcome too."""
    turns, sampled = rows["turn_ids"][i][mask], rows["response_mask"][i][mask]
    rewards = torch.zeros(int(turns.max()) + 1 if len(turns) else 0)
    rewards = rewards.index_add(0, turns, rows["turn_rewards"][i][mask])
    same = rows["sample_id"] == rows["sample_id"][i]
    if len(rewards) and bool(sampled.any()) and i == int(same.nonzero()[-1]):
        outcome = rows["scores"][i] - rows["turn_rewards"][same].sum()
        rewards[-1] += torch.where(outcome.isfinite(), outcome, 0.0)
    earned = {str(turn): round(float(rewards[turn]), 6) for turn in sorted(set(turns[sampled].tolist()))}
    return {"turn_ids": turns.tolist(), "observation": (~sampled).int().tolist(), "turn_rewards": earned}
