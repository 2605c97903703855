"""The words that many docstrings share: arguments, results and errors, said once.

A docstring in the source has what is the function's own. :func:`described` adds the rest, so that ``help``, the site
and ``__doc__`` have the whole list.
"""

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar, get_args

from torch import Tensor

ARGUMENTS = {
    "advantages": "one for each token",
    "all_reduce": "sums a tensor over the ranks, if the data are split over ranks; None: they are whole",
    "all_reduce_rows": (
        "sums a tensor (B,) over the ranks, if sequences are split over ranks; see "
        ":func:`rlprims.layout.sequence_sum`. None: sequences are whole"
    ),
    "beta": "above 0; the strength of the KL to the reference",
    "bootstrap_values": (
        "V of the state after the last token, for truncated responses; 0 for responses that ended. None: every "
        "response ended"
    ),
    "chosen_log_probs": "current policy, sums over the tokens; it gets a gradient",
    "clip_c": "c̄, the largest ratio in the recurrence. It determines how far errors reach back",
    "clip_high": "ε above 1, of the ratio; at least 0",
    "clip_low": "ε below 1, of the ratio; in [0, 1]",
    "clip_rho": "ρ̄, the largest ratio in the TD errors. It determines the policy whose values are estimated",
    "component_scores": "one column for each reward",
    "correct_above": "a response is correct if its score is above this",
    "cu_seqlens": "where packed sequences begin and end; None: the tokens are padded",
    "ddof": "0 or 1: the divisor of σ for n samples is n − ddof",
    "ended": "why each response ended",
    "eps": "ε, in units of the reward; at least 0",
    "gamma": "discount per valid token, in [0, 1]",
    "group_ids": "which prompt each row answers",
    "head_weight": "the weight of the head, in the dtype of hidden",
    "hidden": "the last hidden states at the positions that predict the tokens",
    "high": "upper bound of the ratio, at least 1",
    "kept": (
        "the ids that each token was sampled from, its own among them; None: from the whole vocabulary. See "
        ":func:`rlprims.logprobs.from_logits`"
    ),
    "lam": "λ in [0, 1], from one-step errors (0) to Monte-Carlo returns (1)",
    "log_probs": "current policy; the other arguments are constants",
    "logits": "float (..., V); −inf bans a token",
    "losses": "one for each token",
    "low": "lower bound of the ratio, in [0, 1]",
    "max_length": "L, in tokens; at least 1",
    "normalize_std": "divide by σ + ε",
    "old_log_probs": "policy at the start of the step",
    "penalty_factor": "f, in units of the score; at least 0",
    "ref_chosen_log_probs": "the same under the frozen reference; it gets no gradient",
    "ref_log_probs": "frozen reference",
    "ref_rejected_log_probs": "the same under the frozen reference; it gets no gradient",
    "rejected_log_probs": "current policy, sums over the tokens; it gets a gradient",
    "response_mask": "True on the valid tokens; the others are never read",
    "returns": "",
    "rewards": "per token",
    "rollout_log_probs": "the policy that sampled, in the sampler's own numbers",
    "scores": "one for each response",
    "shard": "this rank's part, if sequences are split over ranks; see :class:`rlprims.types.SequenceShard`",
    "singleton": 'a group of one has no baseline: its advantage is 0 ("zero") or its score ("raw", as verl)',
    "soft_cap": "c > 0 for logits c · tanh(z / c), as in Gemma 2 (arXiv:2408.00118); None for z",
    "state_ids": (
        "int (B, T) or (N,), the state before the turn, on each of its tokens. Any numbers, for example a hash. Equal "
        "numbers of different prompts are different states"
    ),
    "teacher_log_probs": "of the same tokens",
    "teacher_topk_log_probs": "of the same tokens",
    "temperature": "above 0",
    "token_ids": "int64 (...), in [0, V), which is checked on a CPU; or (..., K) for K tokens of each row",
    "tolerance": "a group is constant, and gets 0, if max − min <= tolerance · max(1, |max|, |min|)",
    "topk_log_probs": "student; only it gets a gradient",
    "totals": "counts of the whole step, of :func:`rlprims.losses.count_totals`; None: those of this batch",
    "trajectory_ids": "which rollout each row belongs to",
    "turn_ids": "the turn of the response that a valid token belongs to",
    "valid_rows": "valid rows; other rows are in no statistic and get 0. None: all rows",
    "values": "of the critic, per token",
    "vocab": "this rank's columns, if the vocabulary is split; see :class:`rlprims.types.VocabShard`",
    "w_max": "largest weight, at least 1; None: no bound",
    "weights": "w_k, one for each of the K rewards; None: all 1",
    "x": "",
}
"""What an argument of this name is, wherever it is not something else. Its shape is in its annotation."""

RETURNS = {
    "float (B, T) or (N,)": "0 outside the mask",
    "float (P,)": "one loss for each pair; take the mean",
    "Weights": "a weight for each token without a gradient, 0 outside the mask",
    "bool (B,)": "the same for all rows of a group",
    "dict": "the metrics above by their names",
} | dict.fromkeys(("Mean", "Max", "Correlation", "ExplainedVariance"), "a metric, whose ``value()`` is the number")
"""What a function returns, by the shape in its annotation, or by its type."""

WRONG_TENSORS = "ValueError: wrong shapes or dtypes"
WRONG_OPTIONS = "an option that is out of its range or unknown"

_ENTRY = re.compile(r"^(\w[\w, *]*): ", re.MULTILINE)
_DTYPE = re.compile(r"(?:float|bool|int)\d*\b")
_WIDTH = 112

Function = TypeVar("Function", bound=Callable[..., Any])


def described(function: Function) -> Function:
    """Complete the function's docstring: its sections Args, Returns and Raises.

    An argument that the docstring does not describe gets its entry in ``ARGUMENTS``. A description of a tensor begins
    with the shape in its annotation. Without a section Returns or Raises the result is that of ``RETURNS``, and the
    error that of wrong tensors and options. What the docstring itself says stays.

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
        "Args": _arguments(own.get("Args", ""), hints),
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


def _arguments(own: str, hints: dict[str, Any]) -> str:
    """The descriptions in the order of the signature; one that names several arguments stands at the first."""
    _, *parts = _ENTRY.split(own)
    labels = {name: label for label in parts[::2] for name in label.split(", ")}
    words = dict(zip(parts[::2], parts[1::2], strict=True))
    lines = []
    for name, annotation in hints.items():
        label = labels.get(name, name)
        text = words.pop(label, None) if name in labels else ARGUMENTS.get(name)
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
