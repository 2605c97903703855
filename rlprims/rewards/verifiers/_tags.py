"""Text between tags, boxes and marks: found in one pass."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is no brace


def tagged(text: str, tag: str) -> str | None:
    """What the last ``<tag>...</tag>`` holds."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return text[start + len(opening) : end] if start >= 0 else None


def boxed(text: str) -> str | None:
    r"""What the last ``\boxed{...}`` or ``\fbox{...}`` that is closed holds, with the braces inside it."""
    end = len(text)
    for box in reversed(list(_BOX.finditer(text))):
        close = _closing(text, box.end(), end)
        if close is not None:
            return text[box.end() : close]
        end = box.start()  # what follows is read: each character once
    return None


def _closing(text: str, at: int, end: int) -> int | None:
    depth = 1
    for match in _BRACE.finditer(text, at, end):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return None


def answer_line(text: str, mark: str = "answer") -> str | None:
    """The rest of the last line that has ``Answer:`` in it, as DAPO's prompt asks for."""
    for line in reversed(text.splitlines()):
        at = line.lower().rfind(mark)
        if at >= 0:
            rest = line[at + len(mark) :].lstrip()
            if rest.startswith(":"):
                return rest[1:].strip()
    return None


def fenced(text: str) -> str | None:
    """What the last block between lines of three backticks holds, without its language."""
    end = text.rfind("```")
    start = text.rfind("```", 0, end) if end >= 0 else -1
    if start < 0:
        return None
    _, line, body = text[start + 3 : end].partition("\n")
    return body if line else None


def depth(text: str, brackets: str = "()[]{}") -> int:
    """How deep brackets nest at most."""
    opening, closing = brackets[::2], brackets[1::2]
    now = deepest = 0
    for character in text:
        if character in opening:
            now += 1
            deepest = max(deepest, now)
        elif character in closing:
            now -= 1
    return deepest
