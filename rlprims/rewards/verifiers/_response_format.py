"""A test of the whole response by a regular expression."""

from typing import Any


def response_format(response: str, answer: Any = None, *, pattern: str, seconds: float = 1.0) -> dict[str, float]:
    """1 if the regular expression matches the whole response; the answer is not used.

    ``.`` matches line breaks too. The search stops after ``seconds``, because some patterns take exponential time on
    some texts. Needs the package ``regex`` (extra ``rewards``), whose syntax extends that of ``re``.

    Raises:
        TimeoutError: the search took longer.

    >>> response_format("<think>hm</think><answer>4</answer>", pattern="<think>.*</think>\\\\s*<answer>.*</answer>")
    {'score': 1.0, 'format': 1.0}
    """
    import regex

    found = regex.compile(pattern, regex.DOTALL).fullmatch(response, timeout=seconds) is not None
    return {"score": float(found), "format": float(found)}
