"""All that is told of a step: its formulas, what is wrong, and what could not be told."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlprims._described import formula_of
from rlprims.algorithms import BoundFunction
from rlprims.audit._candidates import Options
from rlprims.audit._checks import CHECKS, check
from rlprims.audit._finding import Finding
from rlprims.audit._found import Found
from rlprims.audit._identify import identify
from rlprims.data_proto import DataProto


@dataclass(frozen=True)
class Report:
    """What :func:`report` found. Printed, it has a line for each stage, and what is wrong."""

    stages: Mapping[str, Found]
    findings: tuple[Finding, ...]
    not_told: Mapping[str, str]
    """What could not be told, by the code of a check or "formulas": what it needs."""

    def __str__(self) -> str:
        lines = [f"{stage}: {found}" for stage, found in self.stages.items()]
        lines += [f"{x.code} {x.severity}: {x.message}\n  {x.consequence}\n  {x.fix}" for x in self.findings]
        codes: dict[str, list[str]] = {}
        for code, need in self.not_told.items():
            codes.setdefault(need, []).append(code)
        lines += [] if self.findings else ["no findings"]
        return "\n".join([*lines, *(f"not told: {', '.join(names)}: {need}" for need, names in codes.items())])

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the docstrings of the formulas, and of the checks that found something."""
        stages = {}
        for stage, found in self.stages.items():
            undecided = {name: [str(value) for value in values] for name, values in found.undecided.items()}
            parts = [x for part in found.parts.values() for x in (part if isinstance(part, tuple) else (part,))]
            used = [x for x in (getattr(part, "loss", part) for part in parts) if isinstance(x, BoundFunction)]
            sources = {part.path: formula_of(part.fn) for part in used}
            stages[stage] = {"said": found.said, "undecided": undecided, "sources": sources}
        findings = [asdict(x) | {"explanation": formula_of(CHECKS[x.code])} for x in self.findings]
        return {"stages": stages, "findings": findings, "not_told": dict(self.not_told)}


def report(
    batch: DataProto | Mapping[str, Any],
    *,
    tokenizer: Any = None,
    options: Options | None = None,
    tolerance: float = 1e-5,
) -> Report:
    """What :func:`identify` and :func:`check` say of a step. Without results it has no stages.

    Raises:
        ValueError: the batch has no ``response_mask``, or a column of another shape.
    """
    checked, stages = check(batch, tokenizer=tokenizer), dict[str, Found]()
    not_told = dict(checked.silent)
    try:
        stages |= identify(batch, options=options, tolerance=tolerance).stages
    except ValueError as error:
        not_told = {"formulas": str(error), **not_told}
    return Report(stages, checked.findings, not_told)
