"""One step of any trainer as a self-contained HTML page: its formulas, what is wrong in it, and its tokens."""

import json
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

_MOST_BYTES = 16_000_000


def write_step_page(
    batch: DataProto | Mapping[str, Any], report: Report, out: Path, *, tokenizer: Any = None, title: str = ""
) -> Path:
    """Write a batch and its report as one HTML page that needs no network and no other file.

    Tokens in the mask have the colour of their advantage, others are grey; the places of findings are marked. Rows with
    findings come first; rows are embedded until 16 MB are used. Text of the model is shown, never run.
    """
    data, texts = tensors_of(batch), batch.non_tensor_batch if isinstance(batch, DataProto) else batch
    marks: dict[int, dict[int, list[str]]] = {}
    for finding in report.checked.findings:
        for row, token in finding.tokens:
            marks.setdefault(row, {}).setdefault(token, []).append(finding.code)
    groups: dict[Any, dict[str, Any]] = {}
    notes, used, count = list[str](), 0, len(data["response_mask"])
    for shown, row in enumerate(sorted(range(count), key=lambda row: row not in marks)):
        codes = marks.get(row, {})
        recorded = row_of(_record(data, texts, row, codes, tokenizer), 0)
        outside = (~data["response_mask"][row, : len(recorded.tokens)]).tolist()
        entry = response_of(recorded) | {"outside": outside, "marks": codes}
        if (used := used + len(as_json(entry))) > _MOST_BYTES:
            notes = [f"To stay small, this page has {shown} of {count} rows."]
            break
        groups.setdefault(recorded.group, {**group_of(recorded), "rows": []})["rows"].append(entry)
    told = json.loads(visible(json.dumps(report.to_json(), ensure_ascii=False)))
    step = {"step": 0, "groups": list(groups.values())}
    return embed({"run": visible(title), "steps": [step], "notes": notes, "audit": told}, out)


def _record(data: Mapping[str, Tensor], texts: Any, row: int, codes: Any, tokenizer: Any) -> dict[str, Any]:
    """A row as a run records it, up to the last token that is learned, read or marked."""

    def column(*names: str) -> list[Any] | None:
        return next((data[name][row].tolist() for name in names if name in data), None)

    mask, pad = data["response_mask"], getattr(tokenizer, "pad_token", None) or "\0"
    decode, width = "{} ".format if tokenizer is None else tokenizer.decode, mask.shape[1]
    seen = mask[row] | data.get("attention_mask", mask)[row, -width:].bool()
    stop = 1 + max([*seen.nonzero().flatten().tolist(), *codes], default=-1)
    ids = column("responses", "completion_ids", "input_ids") or range(width)
    tokens = texts["response_tokens"][row] if "response_tokens" in texts else map(decode, ids[-width:])
    prompt = (
        texts["prompt"][row] if "prompt" in texts else decode(column("prompts", "prompt_ids") or []).replace(pad, "")
    )
    policy, advantages = column("log_probs", "old_log_probs", "rollout_log_probs"), column("advantages")
    return {
        "prompt": prompt,
        "response_tokens": [*tokens, *[""] * width][:stop],
        "rollout_log_probs": policy and policy[:stop],
        "advantages": advantages and advantages[:stop],
        "group": int(data["group_ids"][row]) if "group_ids" in data else row,
        "sample_id": row,
        "score": float(data["scores"][row]) if "scores" in data else None,
        "finding": " ".join(codes.get(-1, ())),
    }
