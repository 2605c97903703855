"""Whether a response has the form of a regular expression."""

from typing import Any


def response_format(response: str, answer: Any = None, *, pattern: str, seconds: float = 1.0) -> dict[str, float]:
    """1 if the whole response has the form of the regular expression; the answer is not read.

    ``.`` matches line breaks too. The search stops after ``seconds``: patterns that try exponentially many ways are
    easily written and a model easily finds the text. Needs the package ``regex`` (extra ``rewards``), whose syntax is
    that of ``re`` and more.

    Raises:
        TimeoutError: the search took longer.

    >>> response_format("<think>hm</think><answer>4</answer>", pattern="<think>.*</think>\\\\s*<answer>.*</answer>")
    {'score': 1.0, 'format': 1.0}
    """
    import regex

    found = regex.compile(pattern, regex.DOTALL).fullmatch(response, timeout=seconds) is not None
    return {"score": float(found), "format": float(found)}
