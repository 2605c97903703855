"""What may be wrong in a step: one function per code. Its docstring is the explanation that a user reads."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from rlprims.audit._checks import _masks, _numbers
from rlprims.audit._checks._step import CannotTell, Step
from rlprims.audit._finding import Checked, Finding
from rlprims.audit._found import tensors_of
from rlprims.data_proto import DataProto

CHECKS: Mapping[str, Callable[[Step], Finding | None]] = MappingProxyType(
    {
        "M4": _masks.padding,
        "N1": _numbers.not_finite,
    }
)
"""By code. A letter for the part: masks, groups, advantages, rewards, log-probs, KL, numbers."""

EXPLAINS: Mapping[str, str] = {}
"""Findings that another one explains are left out."""


def check(batch: DataProto | Mapping[str, Any], *, tokenizer: Any = None) -> Checked:
    """Look for what is wrong in a step: masks, groups, advantages, rewards, log-probs, KL, numbers.

    Every check reads the columns that are there, under the names of this library, TRL or verl; one that lacks some, or
    has too few tokens for its statistic, is in ``silent`` with what it needs. A note is true but may be meant.

    Args:
        batch: named tensors, padded, with ``response_mask`` (B, T).
        tokenizer: shows the text around a finding, and names the begin and end tokens.

    Raises:
        ValueError: the batch has no ``response_mask``, or a column of another shape.

    >>> import torch
    >>> mask = torch.tensor([[True, True, True]])
    >>> print(check({"response_mask": mask, "attention_mask": torch.tensor([[1, 1, 0]])}))
    M4 error: 1 padding tokens are in response_mask; row 0, token 2
      33.3% of the learned tokens is on padding
      response_mask = response_mask & attention_mask
    """
    step = Step(tensors_of(batch))
    found: dict[str, Finding] = {}
    silent: dict[str, str] = {}
    for code, look in CHECKS.items():
        try:
            said = look(step)
        except CannotTell as reason:
            silent[code] = str(reason)
            continue
        if said is not None:
            found[code] = replace(said, code=code, message=said.message + _place(step, said, tokenizer))
    explained = {other for code in found for other in EXPLAINS.get(code, "").split()}
    kept = [x for code, x in found.items() if code not in explained]
    return Checked(tuple(sorted(kept, key=lambda x: x.severity)), silent)


def _place(step: Step, said: Finding, tokenizer: Any) -> str:
    """Where it is first, with the text around it."""
    if not said.tokens:
        return ""
    row, token = said.tokens[0]
    return f"; row {row}" + (f", token {token}" if token >= 0 else "")
