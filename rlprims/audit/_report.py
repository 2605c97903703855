"""All that is told of a step: its formulas, what is wrong, and what could not be told."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlprims._described import formula_of
from rlprims.algorithms import BoundFunction
from rlprims.audit._checks import CHECKS, look_for
from rlprims.audit._checks._step import Step
from rlprims.audit._finding import Checked, Finding
from rlprims.audit._found import tensors_of
from rlprims.audit._identify import Identified, identify
from rlprims.data_proto import DataProto


@dataclass(frozen=True)
class Report:
    """What :func:`report` found."""

    identified: Identified
    checked: Checked

    def __str__(self) -> str:
        codes: dict[str, list[str]] = {}
        for code, need in self.checked.silent.items():
            codes.setdefault(need, []).append(code)
        lines = [str(self.identified)] * bool(self.identified.stages) + [str(self.checked)]
        return "\n".join([*lines, *(f"not told: {', '.join(names)}: {need}" for need, names in codes.items())])

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.checked.findings if finding.severity == "error")

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the docstrings of the formulas, and of the checks that found something."""
        findings = [asdict(x) | {"explanation": formula_of(CHECKS[x.code])} for x in self.checked.findings]
        stages = {}
        for stage, found in self.identified.stages.items():
            parts = [x for part in found.parts.values() for x in (part if isinstance(part, tuple) else (part,))]
            used = [x for x in (getattr(part, "loss", part) for part in parts) if isinstance(x, BoundFunction)]
            undecided = {name: list(map(str, values)) for name, values in found.undecided.items()}
            sources = {part.path: formula_of(part.fn) for part in used}
            stages[stage] = {"said": found.said, "undecided": undecided, "sources": sources}
        return {"stages": stages, "findings": findings, "not_told": dict(self.checked.silent)}


def report(batch: DataProto | Mapping[str, Any], *, tokenizer: Any = None, **settings: Any) -> Report:
    """What :func:`check` and :func:`identify`, with its ``settings``, say of a step; without results no formulas."""
    step = Step(tensors_of(batch), tokenizer)
    try:
        identified, said = identify(batch, **settings), {}
    except ValueError as error:
        identified, said = Identified({}, 0), {"formulas": str(error)}
    stages = identified.stages
    if "advantages" in stages and stages["advantages"].parts:
        step.estimator = stages["advantages"]
    if {"losses", "gradients"} & step.keys() and stages["loss"].parts:
        step.objective = stages
    checked = look_for(step)
    return Report(identified, Checked(checked.findings, {**said, **checked.silent}))
