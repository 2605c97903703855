"""The first part of docs/papers.md on the site: every preset and primitive that has a paper, in the docstrings' words.

The site makes it when it is built; ``python -m tools.paper_pages``, from the root, prints it.
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from rlprims import advantage, controllers, corrections, filters, losses, rewards
from rlprims.algorithms import PRESETS

PACKAGES = (advantage, losses, corrections, rewards, filters, controllers)
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{5})")
SOURCES = re.compile(
    r"\bpapers?\b|disagree|\bpeers?\b|authors|differs from|\bTRL|\bverl\b|OpenRLHF|NeMo|SkyRL|slime|ROLL"
)

HEAD = """# Papers: the sources of presets and primitives

The first part has each preset with its paper, its parts, and its differences from the paper. The second part
has the primitives, with the points on which their sources disagree. The words are those of the docstrings. The
reference of each name has the formulas, [dialects](algorithms.md#dialects) has the numbers of other libraries, and
[coverage](coverage.md) the tests against recorded numbers.
"""


def page() -> str:
    presets = "\n".join(line for name, preset in PRESETS.items() for line in section(name, preset, made_of(preset())))
    parts = "\n".join(line for name, thing in primitives() for line in section(name, thing, ""))
    return f"{HEAD}\n## Presets\n\n{presets}\n## Primitives\n\n{parts}"


def section(name: str, thing: Callable[..., Any], parts: str) -> Iterator[str]:
    summary, *body = paragraphs(thing)
    yield f"### `{name}`\n\n{linked(summary)}\n"
    for paragraph in body:
        if parts or SOURCES.search(paragraph):
            yield linked(paragraph) + "\n"
    if parts:
        yield f"{parts}\n"


def made_of(algorithm: Any) -> str:
    return "Made of " + ", ".join(f"`{part}`" for _, part in algorithm.uses()) + "."


def primitives() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Those whose docstring opens with a paper."""
    for package in PACKAGES:
        for name in getattr(package, "__all__", vars(package)):
            thing = getattr(package, name)
            if getattr(thing, "__module__", "").startswith(package.__name__) and ARXIV.search(paragraphs(thing)[0]):
                yield f"{package.__name__.removeprefix('rlprims.')}.{name}", thing


def paragraphs(thing: Any) -> list[str]:
    """Of a docstring, up to its arguments and without its blocks, as Markdown lines of 120."""
    text = re.split(r"\n(?:Args|Returns|Raises|Attributes):|\n>>>", inspect.getdoc(thing) or "")[0]
    text = re.sub(r":\w+:`~?(?:rlprims\.)?([\w.]+)`", r"`\1`", text).replace("``", "`")
    found = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if not part.startswith((" ", "-"))]
    return [part for part in found if part and not part.endswith("::")] or [""]


def linked(text: str) -> str:
    text = ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    return "\n".join(textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))


if __name__ == "__main__":
    print(page())
