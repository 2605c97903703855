"""The report of broken laws: each cause once, wrong numbers first, and of these the laws of the function's kind."""

from rlprims.testing._bindings import DERIVATIVES, PACKED, TRANSFORMS, Kind, Law
from rlprims.testing._compare import NAN
from rlprims.testing._laws_errors import hyperparameters_matter
from rlprims.testing._laws_numeric import constants_get_no_gradient
from rlprims.testing._primitive import NO_CU_SEQLENS

_HEADINGS = ("wrong numbers", "missing layouts and transforms", "gradients with respect to data", "unfriendly errors")


def report_of(broken: dict[str, str], laws: dict[str, Law], kind: Kind) -> list[str]:
    """The lines: headings, and below each its causes with the laws that they break; ``broken`` is law to cause."""
    sections: dict[str, dict[str, list[str]]] = {heading: {} for heading in _HEADINGS}
    for name in reversed(laws):  # the laws of the kind come last
        if name in broken:
            sections[_heading(laws[name], broken[name], kind)].setdefault(broken[name], []).append(name)
    lines: list[str] = []
    for heading, causes in sections.items():
        lines += [f"{heading}:"] if causes else []
        for cause, (first, *others) in causes.items():
            more = f" ({len(others)} more, for the same cause: {', '.join(others)})" if others else ""
            lines.append(f"  {first}: {cause}{more}")
    return lines


def _heading(law: Law, cause: str, kind: Kind) -> str:
    numbers, missing, gradients, errors = _HEADINGS
    if cause == NAN:
        return numbers
    if cause == NO_CU_SEQLENS or law in sum((*TRANSFORMS, *PACKED), start=()):
        return missing
    if law is constants_get_no_gradient or (law in sum(DERIVATIVES, start=()) and kind in ("advantage", "reward")):
        return gradients
    if law.__module__ == hyperparameters_matter.__module__ and law is not hyperparameters_matter:
        return errors
    return numbers
