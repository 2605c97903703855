"""Search for text in tags, boxes and after marks, in one pass over the text."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # the first alternative skips escaped braces


def tagged(text: str, tag: str) -> str | None:
    """The text in the last ``<tag>...</tag>``; None without such a tag."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return text[start + len(opening) : end] if start >= 0 else None


def boxed(text: str) -> str | None:
    r"""The text in the last closed ``\boxed{...}`` or ``\fbox{...}``; None without a box."""
    end = len(text)
    for box in reversed(list(_BOX.finditer(text))):
        close = _closing(text, box.end(), end)
        if close is not None:
            return text[box.end() : close]
        end = box.start()  # the text after it was searched already
    return None


def _closing(text: str, at: int, end: int) -> int | None:
    depth = 1
    for match in _BRACE.finditer(text, at, end):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return None


def answer_line(text: str, mark: str = "answer") -> str | None:
    """The text after ``Answer:`` on the last line that contains it, the form that DAPO's prompt asks for."""
    for line in reversed(text.splitlines()):
        at = line.lower().rfind(mark)
        if at >= 0:
            rest = line[at + len(mark) :].lstrip()
            if rest.startswith(":"):
                return rest[1:].strip()
    return None


def fenced(text: str) -> str | None:
    """The text of the last block between lines of three backticks, without its language."""
    end = text.rfind("```")
    start = text.rfind("```", 0, end) if end >= 0 else -1
    if start < 0:
        return None
    _, line, body = text[start + 3 : end].partition("\n")
    return body if line else None


def depth(text: str, brackets: str = "()[]{}") -> int:
    """The largest nesting depth of brackets."""
    opening, closing = brackets[::2], brackets[1::2]
    current = deepest = 0
    for character in text:
        if character in opening:
            current += 1
            deepest = max(deepest, current)
        elif character in closing:
            current -= 1
    return deepest
