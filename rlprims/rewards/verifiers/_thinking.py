"""A response without the text between thinking tags."""

import re


def without_thinking(text: str, *, opening: str = "<think>", closing: str = "</think>", opened: bool = False) -> str:
    r"""The text without the part between the tags, so that a verifier reads only the answer.

    A thought that is not closed extends to the end of the text. Text before a closing tag without an opening tag is a
    thought too. ``opened``: the prompt has opened it, so that a text without a closing tag is all thought.

    Raises:
        ValueError: a tag is empty, or both are the same.

    >>> without_thinking(r"<think>\boxed{1}?</think> So \boxed{2}. <think>Or \boxed{3}")
    ' So \\boxed{2}. '
    """
    if not opening or not closing or opening == closing:
        raise ValueError(f"expected two different tags, got opening={opening!r} and closing={closing!r}")
    kept: list[str] = []
    in_thought, start = opened, 0
    for tag in re.finditer(f"{re.escape(opening)}|{re.escape(closing)}", text):
        if tag.group() == closing:
            if not in_thought:
                kept.clear()
            in_thought = False
        elif not in_thought:
            kept.append(text[start : tag.start()])
            in_thought = True
        start = tag.end()
    return "".join(kept) + ("" if in_thought else text[start:])
