"""A step as the checks read it: columns that are there, and what follows from them."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlprims.audit._finding import Finding, Severity

_SHOWN = 8


class CannotTell(Exception):
    """What a check needs, and the batch lacks."""


class Step:
    """The columns by the names of this library; one that is not there raises :class:`CannotTell`."""

    def __init__(self, data: Mapping[str, Tensor]) -> None:
        self.data, self.mask = data, data["response_mask"]
        self.width = self.mask.shape[1]

    def __getitem__(self, name: str) -> Tensor:
        self.need(name in self.data, name)
        return self.data[name]

    def __contains__(self, name: str) -> bool:
        return name in self.data

    def need(self, there: bool, what: str) -> None:
        if not there:
            raise CannotTell(f"needs {what}")

    def per_token(self, name: str) -> Tensor:
        """A column (B, T) in float64, 0 outside the mask and where it is not finite, which N1 reports."""
        x = self[name].double()
        self.need(x.shape == self.mask.shape, f"{name} of the shape of response_mask")
        return torch.where(self.mask & x.isfinite(), x, 0.0)

    @cached_property
    def trainer(self) -> str:
        return "old_log_probs" if "old_log_probs" in self else "log_probs"

    @cached_property
    def attended(self) -> Tensor:
        """bool (B, T): the model reads the token; not padding."""
        return self["attention_mask"][:, -self.width :].bool()

    def share(self, where: Tensor) -> str:
        """The share that some tokens of the mask have in the step."""
        if "advantages" in self:
            size = self.per_token("advantages").abs()
            return f"{float(size[where].sum() / size.sum().clamp(min=1e-30)):.1%} of the sum of |A|"
        return f"{float((where & self.mask).sum() / self.mask.sum().clamp(min=1)):.1%} of the learned tokens"


def finding(where: Tensor | None, message: str, consequence: str, fix: str, severity: Severity = "error") -> Finding:
    """``where`` is bool (B, T), or (B,) for whole rows; the code is that of the check."""
    places: list[Any] = [] if where is None else where.nonzero()[:_SHOWN].tolist()
    tokens = tuple((row, *token, -1)[:2] for row, *token in places)
    return Finding("", severity, message, consequence, fix, tokens)
