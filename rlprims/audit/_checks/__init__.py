"""What may be wrong in a step: one function per code. Its docstring, from ``_texts.json``, explains the code."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlprims.audit._checks._batch import BATCH
from rlprims.audit._checks._log_probs import LOG_PROBS
from rlprims.audit._checks._step import Said, Step
from rlprims.audit._finding import Checked, Finding, Severity
from rlprims.audit._found import TEXTS, tensors_of
from rlprims.data_proto import DataProto

CHECKS: Mapping[str, Callable[[Step], Said]] = {**BATCH, **LOG_PROBS}
"""By code. A letter for the part: masks, groups, advantages, rewards, log-probs, KL, numbers."""

for _code, _look in CHECKS.items():
    _look.__doc__ = TEXTS["page"].format(**TEXTS["pages"][_code])


def check(batch: DataProto | Mapping[str, Any], *, tokenizer: Any = None) -> Checked:
    """Look for what is wrong in a step: masks, groups, advantages, rewards, log-probs, KL, numbers.

    Every check reads the columns that are there, by the names of this library, TRL or verl. One that lacks some, or has
    too few tokens for its statistic, is in ``silent`` with what it needs. A note is true but may be meant.

    Args:
        batch: named tensors, padded, with ``response_mask`` (B, T).
        tokenizer: shows the text around a finding, and knows the begin and end tokens.

    Raises:
        ValueError: no ``response_mask``, or a column of another shape.

    >>> mask = torch.tensor([[True, True, True]])
    >>> print(check({"response_mask": mask, "attention_mask": torch.tensor([[1, 1, 0]])}))
    M4 error: 1 padding tokens are in response_mask; row 0, token 2
      33.3% of the learned tokens is on padding
      response_mask = response_mask & attention_mask.bool()
    """
    return look_for(Step(tensors_of(batch), tokenizer))


def look_for(step: Step) -> Checked:
    """What all checks say of a step."""
    found: dict[str, Finding] = {}
    silent: dict[str, str] = {}
    for code, look in CHECKS.items():
        try:
            found |= _findings(code, step, look(step))
        except (ValueError, RuntimeError, IndexError) as reason:  # no such column, or of another shape
            silent[code] = str(reason)
    explained = {other for code in found for other in TEXTS["explains"].get(code, "").split()}
    kept = (x for code, x in found.items() if code not in explained)
    return Checked(tuple(sorted(kept, key=lambda x: x.severity)), silent)


def _findings(code: str, step: Step, said: Said) -> dict[str, Finding]:
    """The sentences of the code's page, with the numbers; nothing if it is wrong nowhere."""
    found, numbers = said if isinstance(said, tuple) else (said, {})
    page, where = TEXTS["pages"][code], torch.as_tensor(found)
    if not where.any():
        return {}
    places = [(*place, -1)[:2] for place in where.nonzero()[:8].tolist() if place]
    by_row = where.reshape(len(where), -1).any(1) if where.dim() else where
    values = {"n": int(where.sum()), "rows": float(by_row.double().mean()), "share": "", **numbers}
    values |= {"share": step.share(where)} if where.dim() else {}
    message = page["message"].format(**values) + (_place(step, *places[0]) if places else "")
    severity: Severity = "note" if numbers.get("note", page.get("note")) else "error"
    return {code: Finding(code, severity, message, page["number"].format(**values), page["fix"], tuple(places))}


def _place(step: Step, row: int, token: int) -> str:
    """Where it is first, with the text around it."""
    said = f"; row {row}" + (f", token {token}" if token >= 0 else "")
    if step.tokenizer is None or token < 0 or "ids" not in step:
        return said
    cuts = (max(0, token - 4), token), (token, token + 1), (token + 1, token + 5)
    return said + ": {!r} [{!r}] {!r}".format(*(step.tokenizer.decode(step["ids"][row, a:b].tolist()) for a, b in cuts))
