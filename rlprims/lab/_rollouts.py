"""Recorded rollouts as a batch: from JSON lines, from our run directories, and from the logs of verl and TRL."""

import importlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from rlprims.data_proto import DataProto
from rlprims.ended import Ended
from rlprims.grouping import dense_ids
from rlprims.runs.records import RecordedRow, read_rollouts
from rlprims.runs.rows import BadRows, read_rows

Tokenize = Callable[[str], list[str]]

_NAMES = {"score": "scores", "group": "group_ids", "baseline_score": "baseline_scores", "response_ids": "responses"}
"""Other names in records, and the vocabulary's names for them."""


def words(text: str) -> list[str]:
    """Words with the space before them, as tokens of a text without known tokens.

    >>> words("it is 4")
    ['it', ' is', ' 4']
    """
    return re.findall(r"\s*\S+|\s+$", text)


def load_jsonl(path: Path | str, *, tokenize: Tokenize = words) -> DataProto:
    """Load a file with one response per line and the names of the vocabulary.

    A list of numbers is per token and is padded; a number is per response; other values are not changed. The names
    ``score``, ``group``, ``baseline_score`` and ``response_ids`` work too; a group may be a number or a text. Without
    ``response_mask`` all tokens are in the mask; without ``group_ids`` responses with equal ``prompt`` are a group.
    Without any list of numbers the tokens are those of ``tokenize(response)``, and all ratios are 1.

    Raises:
        ValueError: a line that is not an object, lists of different lengths, or a name that is missing in some lines.
    """
    return _batch(_lines(Path(path)), str(path), tokenize)


def load_run(run: Path | str, step: int | Sequence[int] | None = None) -> DataProto:
    """Load the samples of recorded steps of our trainer, with dropped groups and surplus; ``step`` is a column.

    Scores, verifier columns and log-probs are the recorded ones. In a row that was not trained on, ``old_log_probs``
    are the sampler's. Recorded advantages are not used: the stages compute new ones.

    Args:
        run: a run directory.
        step: a recorded step, or several, such as ``range(10, 41, 10)``; the last by default. A group that is in
            several of them is loaded once, from the first in which it was trained on.

    Raises:
        ValueError: nothing is recorded at that step.
    """
    run = Path(run)
    steps = [step] if step is None or isinstance(step, int) else list(step)
    rows = [row for at in steps for row in read_rollouts(run, at) if row.status != "greedy baseline"]
    of_group = {row.group: row.step for row in sorted(rows, key=lambda row: (row.status != "surplus", -row.step))}
    rows = [row for row in rows if row.group is None or row.step == of_group[row.group]]
    episodes = any(row.turn_ids for row in rows)
    numbers = dict.fromkeys(name for row in rows for name, x in row.columns.items() if isinstance(x, int | float))
    return _batch([_record(row, episodes, numbers) for row in rows], str(run), words)


def load_verl(path: Path | str, *, tokenize: Tokenize = words) -> DataProto:
    """Load a file of verl's ``trainer.rollout_data_dir``: texts and scores, without token ids or log-probs.

    Rows with equal ``input`` are a group. Pass the tokenizer's ``tokenize`` to get the true lengths.
    """
    names = {"input": "prompt", "output": "response", "gts": "answer"}
    records = ({names.get(key, key): value for key, value in line.items()} for line in _lines(Path(path)))
    return _batch(records, str(path), tokenize)


def load_trl(
    completions: Path | str | Iterable[Mapping[str, Any]],
    *,
    rewards: Sequence[str] | Mapping[str, float] | None = None,
    tokenize: Tokenize = words,
) -> DataProto:
    """Load what TRL writes with ``log_completions``: a file ``completions/completions_00010.parquet``, or its rows.

    Reading Parquet needs pandas with pyarrow. The score is the weighted sum of the reward columns; a missing reward
    counts 0. TRL's own advantages are in ``trl_advantages``, one per response.

    Args:
        completions: the file, or records of it.
        rewards: names of the reward columns, or their weights; by default every column of floats.
        tokenize: splits a completion's text into tokens, because TRL logs no token ids.

    Raises:
        ValueError: no such reward column.
    """
    if isinstance(completions, str | Path):
        completions = importlib.import_module("pandas").read_parquet(completions).to_dict("records")
    records = [dict(record) for record in cast(Iterable[Mapping[str, Any]], completions)]
    for record in records:
        floats = [name for name, value in record.items() if isinstance(value, float) and name != "advantage"]
        names = floats if rewards is None else rewards
        weights = names if isinstance(names, Mapping) else dict.fromkeys(names, 1.0)
        missing = [name for name in weights if name not in record]
        if missing or not weights:
            raise ValueError(f"rewards has {missing or 'no column'}, expected some of the columns {sorted(record)}")
        terms = ((weight, record[name]) for name, weight in weights.items())
        record["score"] = sum(weight * value for weight, value in terms if value is not None and not math.isnan(value))
        record["prompt"], record["response"] = _text_of(record["prompt"]), _text_of(record.pop("completion"))
        if "advantage" in record:
            record["trl_advantages"] = record.pop("advantage")
    return _batch(records, "completions", tokenize)


def _text_of(text: Any) -> str:
    """A text, or the joined contents of messages."""
    return text if isinstance(text, str) else "\n".join(str(message["content"]) for message in text)


def _record(row: RecordedRow, episodes: bool, numbers: Iterable[str]) -> dict[str, Any]:
    optional = {
        "response_ids": row.response_ids or None,
        "rollout_log_probs": row.log_probs or None,
        "old_log_probs": (row.old_log_probs or row.log_probs) if row.log_probs else None,
        "baseline_score": row.baseline_score,
        "score": math.nan if row.score is None else row.score,
        "ended": int(Ended.from_label(row.ended)) if row.ended else None,
        "group": row.group,
        **{name: math.nan if row.columns.get(name) is None else row.columns[name] for name in numbers},
        # Tokens between the model's turns are outside the mask.
        "response_mask": [not read for read in row.observed] if episodes else None,
        "turn_ids": row.turn_ids if episodes else None,
    }
    return {
        **{name: getattr(row, name) for name in ("step", "prompt", "response", "answer", "status")},
        "response_tokens": row.tokens,
        **{name: value for name, value in optional.items() if value is not None},
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    bad = BadRows(path)
    rows = [row for _, row in read_rows(path, bad)]
    bad.check()
    return rows


def _batch(records: Iterable[Mapping[str, Any]], source: str, tokenize: Tokenize) -> DataProto:
    rows = [{_NAMES.get(name, name): value for name, value in record.items()} for record in records]
    if not rows:
        raise ValueError(f"{source} has no responses")
    for at, row in enumerate(rows):
        if "response_tokens" not in row and not any(_per_token(name, value) for name, value in row.items()):
            row["response_tokens"] = tokenize(str(row.get("response", "")))
        different = {name for name in {*row, *rows[0]} if (name in row) != (name in rows[0])}
        if different:
            names = f"{sorted(different)}, expected the same names in all"
            raise ValueError(f"{source}: response {at} and the first differ in {names}")
    lengths = [_length(row, f"{source}, response {at}") for at, row in enumerate(rows)]
    width = max(*lengths, 1)
    tensors = {"response_mask": torch.arange(width) < torch.tensor(lengths)[:, None]}
    non_tensors: dict[str, list[Any]] = {}
    for name in rows[0]:
        column = [row[name] for row in rows]
        if all(_per_token(name, value) for value in column):
            tensors[name] = torch.tensor([[*value, *[0] * (width - len(value))] for value in column])
        elif all(isinstance(value, int | float) for value in column):
            tensors[name] = torch.tensor(column)
        else:
            non_tensors[name] = column
    tensors["response_mask"] = tensors["response_mask"].bool()
    if "scores" in tensors:
        tensors["scores"] = tensors["scores"].float()
    if "group_ids" in non_tensors:  # names of groups
        non_tensors["group"] = non_tensors.pop("group_ids")
        tensors["group_ids"] = dense_ids(non_tensors["group"])
    if "group_ids" not in tensors and "prompt" in non_tensors:
        tensors["group_ids"] = dense_ids(map(str, non_tensors["prompt"]))
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)


def _per_token(name: str, value: Any) -> bool:
    numbers = isinstance(value, list) and all(isinstance(x, int | float) for x in value)
    return numbers and not name.startswith("prompt")


def _length(row: Mapping[str, Any], where: str) -> int:
    lists = {name: len(value) for name, value in row.items() if name == "response_tokens" or _per_token(name, value)}
    if len(set(lists.values())) != 1:
        raise ValueError(f"{where}: {lists or 'no'} entries, expected as many per-token entries as the response has")
    return next(iter(lists.values()))
