"""What a check of a step found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Severity: TypeAlias = Literal["error", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, with its evidence."""

    code: str
    """Stable, such as ``M1``: a letter for the part of the step, and a number."""
    severity: Severity
    message: str
    """One line: what is wrong and where."""
    consequence: str
    """One line with one number: the share of the gradient, the bias of a weight, ..."""
    fix: str
    """One line: what to write."""
    tokens: tuple[tuple[int, int], ...] = ()
    """Places (row, token) that show it, the clearest first; token -1: the whole row."""


@dataclass(frozen=True)
class Checked:
    """The findings of a step, errors first, and the checks that could not tell."""

    findings: tuple[Finding, ...]
    silent: Mapping[str, str] = field(default_factory=dict)
    """By code what the check needs: columns that the batch lacks, or rows that would decide."""

    def __str__(self) -> str:
        lines = [f"{x.code} {x.severity}: {x.message}\n  {x.consequence}\n  {x.fix}" for x in self.findings]
        return "\n".join(lines) or "no findings"

    @property
    def codes(self) -> tuple[str, ...]:
        return tuple(finding.code for finding in self.findings)
