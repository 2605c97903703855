"""A response without the text between thinking tags."""

import re


def without_thinking(text: str, *, opening: str = "<think>", closing: str = "</think>", opened: bool = False) -> str:
    r"""The text without the part between the tags, so that a verifier reads the answer alone.

    A thought that is not closed goes on to the end: a box in it is no answer. What is before a closing tag that
    nothing opened is a thought too, as the prompt may have opened it; ``opened`` says that it has, so that a text
    without a closing tag is all thought.

    Raises:
        ValueError: a tag is empty, or both are the same.

    >>> without_thinking(r"<think>\boxed{1}?</think> So \boxed{2}. <think>Or \boxed{3}")
    ' So \\boxed{2}. '
    """
    if not opening or not closing or opening == closing:
        raise ValueError(f"expected two different tags, got opening={opening!r} and closing={closing!r}")
    kept: list[str] = []
    thinks, start = opened, 0
    for tag in re.finditer(f"{re.escape(opening)}|{re.escape(closing)}", text):
        if tag.group() == closing:
            if not thinks:
                kept.clear()
            thinks = False
        elif not thinks:
            kept.append(text[start : tag.start()])
            thinks = True
        start = tag.end()
    return "".join(kept) + ("" if thinks else text[start:])
