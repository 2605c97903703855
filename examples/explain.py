"""A page about an algorithm: its stages with their formulas, its papers, and the findings of ``check``.

In a notebook, with this file beside it:

>>> print(explain("gpg").splitlines()[0])
gpg
"""

import inspect
import re
from collections.abc import Callable
from html import escape
from textwrap import indent
from typing import Any

from rlprims.algorithms import PRESETS, Algorithm, check

_SECTIONS = re.compile(r"^(Args|Returns|Raises|Attributes):|^>>> ", re.MULTILINE)
_ROLE = re.compile(r":\w+:`~?([^`]+)`")
_PAPER = re.compile(r"arXiv:\d{4}\.\d{4,5}")


class Page(str):
    """Text that terminals and notebooks show without quotes and escapes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre style='white-space:pre-wrap'>{escape(self)}</pre>"


def explain(algorithm: str | Algorithm) -> Page:
    """An algorithm's stages with their formulas and hyperparameters, its papers, and the findings of ``check``.

    The text is from the docstrings of the primitives, up to their arguments.

    Args:
        algorithm: an algorithm, or the name of a preset.

    Raises:
        ValueError: there is no preset of this name.
    """
    about = ""
    if isinstance(algorithm, str):
        if algorithm not in PRESETS:
            raise ValueError(f"no preset {algorithm!r}, expected one of {', '.join(sorted(PRESETS))}")
        about, algorithm = _body(PRESETS[algorithm]), PRESETS[algorithm]()
    filtered = f", groups filtered by {algorithm.filter.metric}" if algorithm.filter else ""
    batches = f"{algorithm.epochs} epochs of {algorithm.mini_batches} mini-batches per training batch"
    shape = f"{algorithm.group_size} responses per prompt{filtered}; {batches}"
    parts = [algorithm.name, about, f"{shape}\nneeds {', '.join(sorted(algorithm.needs))}"]
    papers = dict.fromkeys(_PAPER.findall(about), "the algorithm")
    for stage, part in algorithm.uses():
        body = _body(part.fn)
        settings = ", ".join(f"{name}={value!r}" for name, value in part.hyperparameters.items())
        parts.append("\n".join(filter(None, [f"{stage}: {part.path}", indent(settings, "  "), indent(body, "    ")])))
        for paper in _PAPER.findall(body):
            papers.setdefault(paper, stage)
    parts.append("\n".join(["papers", *(f"  {paper}  {stage}" for paper, stage in papers.items())]) if papers else "")
    findings = [f"  {finding.severity}: {finding.message}" for finding in check(algorithm)]
    parts.append("\n".join(["findings", *findings]) if findings else "")
    return Page("\n\n".join(filter(None, parts)))


def _body(fn: Callable[..., Any]) -> str:
    """The text of a docstring before its sections, without markup."""
    text = inspect.getdoc(fn) or ""
    cut = _SECTIONS.search(text)
    return _ROLE.sub(r"\1", text[: cut.start()] if cut else text).replace("``", "").strip()
