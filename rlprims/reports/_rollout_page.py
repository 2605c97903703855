"""All recorded rollouts of a run as one self-contained HTML page."""

import base64
import hashlib
import json
import math
import re
from importlib import resources
from pathlib import Path
from typing import Any

from rlprims.reports._visible import visible
from rlprims.runs.records import RecordedRow, file_of, parsed, recorded_steps

_MOST_BYTES, _LARGEST_IMAGE = 64_000_000, 2_000_000
_BASE64 = re.compile("[A-Za-z0-9+/]*={0,2}")


def write_page(
    run: Path, out: Path, *, step: int | None = None, source: str | None = None, most_bytes: int = _MOST_BYTES
) -> Path:
    """Write the run's rollouts as one HTML page that needs no network and no other file.

    The page shows one recorded step at a time. Rows are embedded from the newest step back until ``most_bytes`` are
    used; the page says which rows it leaves out, and which lines were damaged. Text of the model is shown, never run.

    Args:
        run: a run directory.
        out: the file.
        step: only this recorded step.
        source: only prompts of this ``data_source``.
        most_bytes: the largest size of all rows together.

    Raises:
        ValueError: nothing recorded, or not at that step, or not of that source.
    """
    run = Path(run)
    files = recorded_steps(run) if step is None else {step: file_of(run, step)}
    return embed(_embedded(run, files, source, most_bytes), out)


def embed(data: dict[str, Any], out: Path) -> Path:
    """Write the page that shows these data."""
    template = resources.files("rlprims.reports").joinpath("rollouts.html").read_text(encoding="utf-8")
    script = template.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    before, after = template.replace("SCRIPT_DIGEST", digest).split("ROLLOUT_DATA")
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(before + as_json(data) + after, encoding="utf-8")
    return out


def _embedded(run: Path, files: dict[int, Path], source: str | None, most_bytes: int) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    notes: list[str] = []
    sources: set[str] = set()
    used, full = 0, False
    for step, path in reversed(files.items()):
        groups: dict[Any, dict[str, Any]] = {}
        for at, row in parsed(path, step):
            if isinstance(row, ValueError):
                notes.append(f"{path.name}, line {at} is damaged and left out.")
                continue
            sources.add(row.data_source)
            if source not in (None, row.data_source):
                continue
            key = ("alone", at) if row.group is None else row.group
            group, entry = groups.get(key) or group_of(row), response_of(row)
            entry |= {"images": _images(row)} if key in groups and row.images is not None else {}
            used += len(as_json(entry)) + (0 if key in groups else len(as_json(group)))
            if used > most_bytes:
                full = True
                break
            groups.setdefault(key, group)["rows"].append(entry)
        if groups:
            steps.append({"step": step, "groups": list(groups.values())})
        if full:
            kept = f"the newest {len(steps)} of {len(files)} recorded steps" if steps else "none of the recorded steps"
            kept += f", step {step} in part" if groups else ""
            choose = "Choose another by: rlprims rollouts RUN --html FILE --step N."
            notes.insert(0, f"To stay small, this page has {kept}. {choose}")
            break
    if source is not None and source not in sources:
        raise ValueError(f"no rollout from {source!r}; the sources are {', '.join(sorted(sources)) or 'none'}")
    return {"run": visible(run.resolve().name), "steps": steps[::-1], "notes": notes[:20]}


def group_of(row: RecordedRow) -> dict[str, Any]:
    texts = {"prompt": row.prompt, "answer": row.answer, "source": row.data_source}
    shown = {name: visible(text) for name, text in texts.items()}
    return {"id": row.group, **shown, "images": _images(row), "greedy": _short(row.baseline_score), "rows": []}


def _images(row: RecordedRow) -> list[str]:
    return [image for image in row.images or () if len(image) <= _LARGEST_IMAGE and _BASE64.fullmatch(image)]


def response_of(row: RecordedRow) -> dict[str, Any]:
    """The response with short numbers; one advantage instead of a list if all tokens have the same."""
    advantages = None if row.advantages is None else [_short(value) for value in row.advantages]
    if advantages and len(set(advantages)) == 1:
        advantages = advantages[0]  # type: ignore[assignment]
    return {
        "id": row.sample_id,
        "score": _short(row.score),
        "shaped": _short(row.shaped_score),
        "status": visible(row.outcome),
        "leftOut": row.is_left_out,
        "ended": visible(row.ended),
        "tokens": [visible(token) for token in row.tokens],
        "logProbs": [_short(value, digits=3) for value in row.log_probs],
        "advantages": advantages,
        "turns": _turns(row),
        "columns": {visible(key): _shown(value) for key, value in row.columns.items() if value not in (None, "")},
    }


def _turns(row: RecordedRow) -> list[dict[str, Any]]:
    """The turns of an episode: the begin and end of each, the number of tokens that it read, and its reward."""
    turns: list[dict[str, Any]] = []
    for at, turn in enumerate(row.turn_ids):
        if not turns or turns[-1]["turn"] != turn:
            reward = _short(row.turn_rewards.get(turn))
            turns.append({"turn": turn, "start": at, "stop": at, "read": 0, "reward": reward})
        turns[-1]["stop"] = at + 1
        turns[-1]["read"] += row.observed[at] if row.observed else 0
    return turns


def _short(value: float | None, *, digits: int = 4) -> float | None:
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


def _shown(value: Any) -> float | str | None:
    return _short(value) if isinstance(value, int | float) else visible(str(value))


def as_json(value: Any) -> str:
    """JSON for a script element: ASCII, without ``<``, which could end the element or open a comment."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
