"""Fenced blocks of a text, and the choice of the block with the program. The time is linear in the text."""

import re
from typing import Literal, NamedTuple, TypeAlias

Blocks: TypeAlias = Literal["last", "joined"]
_PYTHON = re.compile(r"(?:python|py)[\d.]*\Z")
_FENCE = "```"


class Block(NamedTuple):
    language: str
    """In lower case; empty if the block has none."""
    body: str


def fenced_blocks(text: str) -> list[Block]:
    """All blocks between a line that ends with three backticks and an optional language, and closing backticks.

    A block that is not closed is left out. The closing backticks may be at the end of the last line of code.
    """
    blocks: list[Block] = []
    language = ""
    body: list[str] | None = None
    for line in text.split("\n"):
        before, mark, after = line.rpartition(_FENCE)
        if body is None:
            words = after.split(None, 1)
            starts_line = not before.strip("`> \t*-0123456789.")
            if mark and (starts_line or len(words) <= 1):
                language, body = (words[0].lower() if words else ""), []
        elif mark and not after.strip():
            rest = before.rstrip("`")
            blocks.append(Block(language, "\n".join([*body, *([rest] if rest.strip() else [])]) + "\n"))
            body = None
        else:
            body.append(line)
    return blocks


def python_code(text: str, blocks: Blocks, name: str | None = None) -> str | None:
    """The program in a response: its Python blocks joined, or the last of them, preferably one that defines ``name``.

    If there are no Python blocks, blocks without a language are used, and otherwise blocks of any language.
    """
    found = fenced_blocks(text)
    bodies = [block.body for block in found if _PYTHON.match(block.language)]
    bodies = bodies or [block.body for block in found if not block.language]
    bodies = bodies or [block.body for block in found]
    if not bodies:
        return None
    if blocks == "joined":
        return "\n".join(bodies)
    return next((body for body in reversed(bodies) if name and defines(body, name)), bodies[-1])


def defines(code: str, name: str) -> bool:
    """Whether a line of the code defines a function, class or variable with this name."""
    return (
        re.search(rf"^\s*(?:(?:async\s+)?def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*=", code, re.M)
        is not None
    )
