"""The words that many docstrings share: arguments, results and errors, said once.

A docstring in the source has what is the function's own. :func:`described` adds the rest to ``__doc__``.
"""

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar, get_args

from torch import Tensor

from rlprims._json import beside

_WORDS = beside(__file__, "_glossary.json")
ARGUMENTS: dict[str, str] = _WORDS["arguments"]
"""What an argument of this name is, wherever it is not something else. Its shape is in its annotation."""
RETURNS: dict[str, str] = _WORDS["returns"]
"""What a function returns, by the shape in its annotation, or by its type."""

WRONG_TENSORS = "ValueError: wrong shapes or dtypes"
WRONG_OPTIONS = "an option that is out of its range or unknown"

_SECTIONS = re.compile(r"^(Args|Returns|Raises|Attributes):|^>>> ", re.MULTILINE)
_ROLE = re.compile(r":\w+:`~?([^`]+)`")
_ENTRY = re.compile(r"^(\w[\w, *]*): ", re.MULTILINE)
_DTYPE = re.compile(r"(?:float|bool|int)\d*\b")
_WIDTH = 112

Function = TypeVar("Function", bound=Callable[..., Any])


def described(function: Function) -> Function:
    """Complete the function's docstring: its sections Args, Returns and Raises.

    An argument that the docstring does not describe gets its entry in ``ARGUMENTS``, or "see above" if the prose names
    it. A description of a tensor begins with the shape in its annotation. Without a section Returns or Raises the
    result is that of ``RETURNS``, and the error that of wrong tensors and options.

    >>> from rlprims.types import CuSeqlens, PerToken, TokenMask
    >>> @described
    ... def nll(log_probs: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> PerToken:
    ...     '''loss = −log π.
    ...
    ...     Args:
    ...         response_mask: the tokens to imitate.
    ...     '''
    >>> print(nll.__doc__)
    loss = −log π.
    <BLANKLINE>
    Args:
        log_probs: float (B, T) or (N,); current policy; the other arguments are constants.
        response_mask: bool (B, T) or (N,); the tokens to imitate.
        cu_seqlens: int (B+1,); where packed sequences begin and end; None: the tokens are padded.
    <BLANKLINE>
    Returns:
        float (B, T) or (N,); 0 outside the mask.
    <BLANKLINE>
    Raises:
        ValueError: wrong shapes or dtypes.
    """
    if not function.__doc__:  # python -OO
        return function
    prose, own = _sections(inspect.cleandoc(function.__doc__))
    code, annotations = function.__code__, function.__annotations__
    hints = {name: annotations.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    result = annotations.get("return")
    returned = own.get("Returns") or RETURNS.get(_shape(result) or getattr(result, "__name__", ""), "")
    sections = {
        "Args": _arguments(own.get("Args", ""), hints, "\n".join(prose)),
        "Returns": _wrapped(_with_shape(returned, result)),
        "Raises": own.get("Raises") or _errors(hints, has_options=code.co_kwonlyargcount > 0),
    }
    written = ["\n    ".join([f"{name}:", *text.split("\n")]) for name, text in sections.items() if text]
    place = next((i for i, block in enumerate(prose) if block.startswith(">>>")), len(prose))
    function.__doc__ = "\n\n".join([*prose[:place], *written, *prose[place:]])
    return function


def _sections(text: str) -> tuple[list[str], dict[str, str]]:
    """The blocks of a docstring, and those of them that are sections, by name."""
    prose, own = [], {}
    for block in text.split("\n\n"):
        name, _, body = block.partition(":\n")
        if name in ("Args", "Returns", "Raises"):
            own[name] = textwrap.dedent(body)
        else:
            prose.append(block)
    return prose, own


def _arguments(own: str, hints: dict[str, Any], prose: str) -> str:
    """The descriptions in the order of the signature; one that names several arguments stands at the first."""
    _, *parts = _ENTRY.split(own)
    labels = {name: label for label in parts[::2] for name in label.split(", ")}
    words = dict(zip(parts[::2], parts[1::2], strict=True))
    lines = []
    for name, annotation in hints.items():
        label = labels.get(name, name)
        in_prose = "see above" if re.search(rf"\b{name}\b", prose) else None
        text = words.pop(label, None) if name in labels else ARGUMENTS.get(name, in_prose)
        if text is not None:
            lines.append(_wrapped(f"{label}: {_with_shape(text.strip(), annotation)}", indent="    "))
    return "\n".join(lines)


def _shape(annotation: Any) -> str:
    """The text of ``Annotated[Tensor, text]``, also if it is optional; else nothing."""
    options = get_args(annotation)
    for part in options if type(None) in options else (annotation,):
        if isinstance(found := getattr(part, "__metadata__", ("",))[0], str) and found:
            return found
    return ""


def _with_shape(words: str, annotation: Any) -> str:
    shape = "" if _DTYPE.match(words) else _shape(annotation)
    text = "; ".join(filter(None, (shape, words)))
    return text and text.removesuffix(".") + "."


def _wrapped(text: str, indent: str = "") -> str:
    if all(len(line) <= _WIDTH for line in text.split("\n")):
        return text
    text = " ".join(text.split())
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _errors(hints: dict[str, Any], *, has_options: bool) -> str:
    if not any(hint is Tensor or _shape(hint) for hint in hints.values()):
        return ""
    return f"{WRONG_TENSORS}; {WRONG_OPTIONS}." if has_options else f"{WRONG_TENSORS}."


def formula_of(function: Callable[..., Any]) -> str:
    """The text of a docstring before its sections, without markup."""
    text = inspect.getdoc(function) or ""
    cut = _SECTIONS.search(text)
    return _ROLE.sub(r"\1", text[: cut.start()] if cut else text).replace("``", "").strip()
