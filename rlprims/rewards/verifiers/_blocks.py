"""Fenced blocks of a text, and which of them is the program; in time linear in the text."""

import re
from typing import Literal, NamedTuple, TypeAlias

Blocks: TypeAlias = Literal["last", "joined"]
_PYTHON = re.compile(r"(?:python|py)[\d.]*\Z")
_FENCE = "```"


class Block(NamedTuple):
    language: str
    """lower case, or nothing"""
    body: str


def fenced_blocks(text: str) -> list[Block]:
    """Every block between a line that ends with three backticks and a language, or none, and one with backticks alone.

    A block that nothing closes is none. The closing backticks may stand at the end of the last line of code.
    """
    blocks: list[Block] = []
    language = ""
    body: list[str] | None = None
    for line in text.split("\n"):
        before, mark, after = line.rpartition(_FENCE)
        if body is None:
            words = after.split(None, 1)
            alone = not before.strip("`> \t*-0123456789.")
            if mark and (alone or len(words) <= 1):
                language, body = (words[0].lower() if words else ""), []
        elif mark and not after.strip():
            rest = before.rstrip("`")
            blocks.append(Block(language, "\n".join([*body, *([rest] if rest.strip() else [])]) + "\n"))
            body = None
        else:
            body.append(line)
    return blocks


def python_code(text: str, blocks: Blocks, name: str | None = None) -> str | None:
    """The program in a response: its Python blocks joined, or the last of them, if it can be one that defines ``name``.

    Blocks that say Python go before those that say nothing, and these before those of another language.
    """
    found = fenced_blocks(text)
    chosen = [block.body for block in found if _PYTHON.match(block.language)]
    chosen = chosen or [block.body for block in found if not block.language]
    chosen = chosen or [block.body for block in found]
    if not chosen:
        return None
    if blocks == "joined":
        return "\n".join(chosen)
    return next((body for body in reversed(chosen) if name and defines(body, name)), chosen[-1])


def defines(code: str, name: str) -> bool:
    """Whether a line of the code defines a function, or class, or variable of this name."""
    return (
        re.search(rf"^\s*(?:(?:async\s+)?def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*=", code, re.M)
        is not None
    )
