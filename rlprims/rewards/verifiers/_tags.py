"""Search for text in tags, boxes and after marks, in one pass over the text."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(-?\d+(?:[.,]\d+)*|[A-Z](?![A-Za-z])))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # the first alternative skips escaped braces

_MARKUP = "*`$[]\\ \t"
"""A line of only these characters begins a formula."""
_MARKED = re.compile(r"final answer is:?\s*", re.IGNORECASE)
_ENCLOSED = ((r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("$", "$"))


def tagged(text: str, tag: str) -> str | None:
    """The text in the last ``<tag>...</tag>``; None without such a tag."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return text[start + len(opening) : end] if start >= 0 else None


def boxed(text: str) -> str | None:
    r"""The text in the last closed ``\boxed{...}`` or ``\fbox{...}``, or the number of ``\boxed 7``; None without."""
    end = len(text)
    for box in reversed(list(_BOX.finditer(text))):
        if box.group(1):
            return box.group(1)
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
    """The text after ``Answer:`` on the last line that contains it, the form that DAPO's prompt asks for.

    Marks of markdown are left out: ``**Answer:** 7``. If nothing follows the word, the answer is on the next line.
    """
    lines = text.splitlines()
    for at in reversed(range(len(lines))):
        place = lines[at].lower().rfind(mark)
        if place < 0:
            continue
        rest = lines[at][place + len(mark) :].lstrip("*_ \t")
        is_heading = not rest and lines[at].lstrip().startswith(("#", "**"))
        if rest.startswith((":", "：")) or is_heading:
            rest = rest[1:].strip("*` \t")
            return rest or next((line.strip("*` \t") for line in lines[at + 1 :] if line.strip(_MARKUP)), "")
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


def final_answer_phrase(text: str) -> str | None:
    r"""The text after the last "the final answer is", up to the end of its formula or of its sentence."""
    marks = [mark.end() for mark in _MARKED.finditer(text)]
    if not marks:
        return None
    rest = text[marks[-1] :].partition("\n")[0]
    for opening, closing in _ENCLOSED:
        if rest.startswith(opening):
            inner, mark, _ = rest[len(opening) :].partition(closing)
            return inner.strip() if mark else None
    return re.split(r"\.(?:\s|$)", rest, maxsplit=1)[0].strip() or None
