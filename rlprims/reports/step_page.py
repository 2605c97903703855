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
    steps = [{"step": 0, "groups": list(groups.values())}]
    return embed({"run": visible(title), "steps": steps, "notes": notes, "audit": told}, out)


def _record(
    data: Mapping[str, Tensor], texts: Any, row: int, codes: Mapping[int, list[str]], tokenizer: Any
) -> dict[str, Any]:
    """A row as a run records it, up to the last token that is learned, read or marked."""
    mask = data["response_mask"]
    width = mask.shape[1]
    seen = mask[row] | data.get("attention_mask", mask)[row, -width:].bool()
    stop = 1 + max([*seen.nonzero().flatten().tolist(), *codes], default=-1)
    ids = next((data[n][row, -width:] for n in ("responses", "completion_ids", "input_ids") if n in data), None)
    tokens = [f"{at} " for at in range(width)] if ids is None else [_text(x, tokenizer) for x in ids[:, None]]
    if "response_tokens" in texts:
        tokens = [*texts["response_tokens"][row], *[""] * width]
    prompt = next((data[name][row] for name in ("prompts", "prompt_ids") if name in data), None)
    policies = [data[n][row, :stop] for n in ("log_probs", "old_log_probs", "rollout_log_probs") if n in data]
    return {
        "prompt": texts["prompt"][row] if "prompt" in texts else _text(prompt, tokenizer),
        "response_tokens": tokens[:stop],
        "rollout_log_probs": policies[0].tolist() if policies else None,
        "advantages": data["advantages"][row, :stop].tolist() if "advantages" in data else None,
        "group": int(data["group_ids"][row]) if "group_ids" in data else row,
        "sample_id": row,
        "score": float(data["scores"][row]) if "scores" in data else None,
        "finding": " ".join(codes.get(-1, ())),
    }


def _text(ids: Tensor | None, tokenizer: Any) -> str:
    """Decoded, without padding; or the ids themselves."""
    if ids is None or tokenizer is None:
        return "" if ids is None else "".join(f"{token} " for token in ids.tolist())
    return str(tokenizer.decode(ids[ids != tokenizer.pad_token_id] if len(ids) > 1 else ids))
