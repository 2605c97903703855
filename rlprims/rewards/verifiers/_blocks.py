"""Fenced blocks of a text, and the choice of the block with the program. The time is linear in the text."""

import re
from collections import deque
from typing import Literal, NamedTuple, TypeAlias

Blocks: TypeAlias = Literal["last", "joined"]
_PYTHON = re.compile(r"(?:python|py)[\d.]*\Z")
_FENCE = re.compile(r"`{3,}|~{3,}")
_TAG = re.compile(r"</?\w{1,20}>")
_FENCE_BEFORE = re.compile(r"(?:```|~~~)\w{0,20}\Z")
_READS = re.compile(r"\binput\s*\(|\bstdin\b|\bopen\(0")
_PROMPT = ">>> "


class Block(NamedTuple):
    language: str
    """In lower case; empty if the block has none."""
    body: str


def fenced_blocks(text: str, *, unclosed: bool = False) -> list[Block]:
    """All blocks between a line that ends with three backticks or tildes and an optional language, and a closing mark.

    The closing mark may be at the end of the last line of code. The indentation of the opening line is removed. A block
    that is not closed is left out; with ``unclosed`` it ends where a block of Python begins, or with the text.
    """
    blocks: list[Block] = []
    language, mark, indent = "", "", 0
    body: list[str] | None = None
    for line in _TAG.sub(_on_its_own_line, text).split("\n"):
        fence = _last_fence(line)
        before, after = (line[: fence.start()], line[fence.end() :]) if fence else (line, "")
        words = after.split(None, 1)
        first = words[0].lower() if words else ""
        starts_line = not before.strip("`> \t*-0123456789.")
        if body is not None and fence and fence.group().startswith(mark) and not words:
            rest = before.rstrip("`~")
            blocks.append(_block(language, [*body, *([rest] if rest.strip() else [])], indent))
            body = None
        elif fence and (body is None or (unclosed and starts_line and _PYTHON.match(first))):
            if starts_line or len(words) <= 1:
                if body is not None:
                    blocks.append(_block(language, body, indent))
                language, body, mark = first, [], fence.group()[:3]
                indent = len(before) - len(before.lstrip()) if starts_line else 0
        elif body is not None:
            body.append(line)
    if unclosed and body:
        blocks.append(_block(language, body, indent))
    return blocks


def _on_its_own_line(tag: re.Match[str]) -> str:
    """A tag behind a mark begins a line, because a thought may end with a block."""
    is_behind = _FENCE_BEFORE.search(tag.string[max(0, tag.start() - 24) : tag.start()])
    return f"\n{tag.group()}" if is_behind else tag.group()


def _last_fence(line: str) -> re.Match[str] | None:
    if "```" not in line and "~~~" not in line:
        return None
    return deque(_FENCE.finditer(line), maxlen=1).pop()


def _block(language: str, lines: list[str], indent: int) -> Block:
    return Block(language, "\n".join(line[min(indent, len(line) - len(line.lstrip())) :] for line in lines) + "\n")


def python_code(text: str, blocks: Blocks, name: str | None = None, *, reads: bool = False) -> str | None:
    """The program in a response: its Python blocks joined, or the last of them, preferably one that defines ``name``.

    ``reads``: preferably one that reads its input, because an example of its use may follow. If there are no Python
    blocks, blocks without a language are used, and otherwise blocks of any language.
    """
    found = fenced_blocks(text, unclosed=True)
    bodies = [block.body for block in found if _PYTHON.match(block.language)]
    bodies = bodies or [block.body for block in found if not block.language]
    bodies = bodies or [block.body for block in found]
    bodies = [body for body in bodies if not body.startswith(_PROMPT)] or bodies
    if not bodies:
        return None
    if blocks == "joined":
        return "\n".join(bodies)
    wanted = [body for body in bodies if (name and defines(body, name)) or (reads and _READS.search(body))]
    return (wanted or bodies)[-1]


def defines(code: str, name: str) -> bool:
    """Whether a line of the code defines a function, class or variable with this name."""
    pattern = rf"^\s*(?:(?:async\s+)?def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*="
    return re.search(pattern, code, re.M) is not None
