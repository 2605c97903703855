"""One step of any trainer as a self-contained HTML page: its formulas, what is wrong in it, and its tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rlprims.audit import Report
from rlprims.audit._found import tensors_of
from rlprims.data_proto import DataProto
from rlprims.reports._rollout_page import as_json, embed, group_of, response_of
from rlprims.reports._visible import visible
from rlprims.runs.records import row_of

_POLICIES = ("log_probs", "old_log_probs", "rollout_log_probs")


def write_step_page(
    batch: DataProto | Mapping[str, Any],
    report: Report,
    out: Path | str,
    *,
    tokenizer: Any = None,
    title: str = "a step",
    most_bytes: int = 16_000_000,
) -> Path:
    """Write a report and its batch as one HTML page that needs no network and no other file.

    Tokens in the mask have the colour of their advantage, others are grey; the places of findings are marked, and rows
    with findings come first. Text of the model is shown, never run.

    Args:
        batch: that of the report.
        report: the result of :func:`rlprims.audit.report`.
        out: the file.
        tokenizer: decodes the ids in ``responses`` and ``prompts``; without it a token is its id.
        title: the name of the step.
        most_bytes: the largest size of all rows together.
    """
    data = tensors_of(batch)
    texts: Any = batch.non_tensor_batch if isinstance(batch, DataProto) else batch
    marks: dict[int, dict[int, list[str]]] = {}
    for finding in report.findings:
        for row, token in finding.tokens:
            marks.setdefault(row, {}).setdefault(token, []).append(finding.code)
    groups: dict[Any, dict[str, Any]] = {}
    notes, used, count = list[str](), 0, len(data["response_mask"])
    for shown, row in enumerate(sorted(range(count), key=lambda row: row not in marks)):
        found = marks.get(row, {})
        record, first, outside = _record(data, texts, row, found, tokenizer)
        codes = {token - first: each for token, each in found.items() if token >= 0}
        recorded = row_of(record, 0)
        entry = response_of(recorded) | {"first": first, "outside": outside, "marks": codes}
        if (used := used + len(as_json(entry))) > most_bytes:
            notes = [f"To stay small, this page has {shown} of {count} rows."]
            break
        groups.setdefault(recorded.group, {**group_of(recorded), "rows": []})["rows"].append(entry)
    step = {"step": 0, "groups": list(groups.values())}
    told = _visible(report.to_json())
    return embed({"run": visible(title), "steps": [step], "notes": notes, "audit": told}, Path(out))


def _record(
    data: Mapping[str, Tensor], texts: Mapping[str, Any], row: int, found: Mapping[int, list[str]], tokenizer: Any
) -> tuple[dict[str, Any], int, list[bool]]:
    """A row as a run records it, from its first token; the place of this; and which tokens are outside the mask."""
    mask = data["response_mask"][row]
    seen, width = mask.clone(), len(mask)
    if "attention_mask" in data:
        seen |= data["attention_mask"][row, -width:].bool()
    places = [*seen.nonzero()[:, 0].tolist(), *(token for token in found if 0 <= token < width)] or [0]
    first, span = min(places), slice(min(places), max(places) + 1)
    if "response_tokens" in texts:
        tokens = [*texts["response_tokens"][row], *[""] * width]
    else:
        ids = next((data[n][row, -width:] for n in ("responses", "completion_ids", "input_ids") if n in data), None)
        tokens = [f"{at} " for at in range(width)] if ids is None else [_text(x, tokenizer) for x in ids[:, None]]
    prompt = next((data[name][row] for name in ("prompts", "prompt_ids") if name in data), None)
    record = {
        "prompt": texts["prompt"][row] if "prompt" in texts else _text(prompt, tokenizer),
        "response_tokens": tokens[span],
        "rollout_log_probs": next((data[name][row, span].tolist() for name in _POLICIES if name in data), None),
        "advantages": data["advantages"][row, span].tolist() if "advantages" in data else None,
        "group": int(data["group_ids"][row]) if "group_ids" in data else row,
        "sample_id": row,
        "score": float(data["scores"][row]) if "scores" in data else None,
        "finding": " ".join(found.get(-1, ())),
    }
    return record, first, (~mask[span]).tolist()


def _text(ids: Tensor | None, tokenizer: Any) -> str:
    """Decoded, without padding; or the ids themselves."""
    if ids is None or tokenizer is None:
        return "" if ids is None else "".join(f"{token} " for token in ids.tolist())
    return str(tokenizer.decode(ids[ids != tokenizer.pad_token_id] if len(ids) > 1 else ids))


def _visible(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {visible(str(name)): _visible(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_visible(each) for each in value]
    return visible(value) if isinstance(value, str) else value
