"""Why a turn does not extend a row."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from rlprims.turns._turn import Row, Turn

Kind: TypeAlias = Literal["extends", "own token", "other token", "special token", "shorter prompt"]
_CONTEXT, _SHOWN = 8, 4
"""Tokens that are shown before the break, and from it on."""


class Explanation(NamedTuple):
    """How a prompt relates to what was there before it. ``str()`` of it is a sentence."""

    kind: Kind
    position: int
    """The first token that differs; if none does, where the shorter of the two ends."""
    before: str
    """The last tokens that both have."""
    expected: str
    """The first tokens from the position on of what was there before."""
    got: str
    """The first tokens from the position on of the prompt."""

    def __str__(self) -> str:
        place = f"at token {self.position}, after {self.before}"
        match self.kind:
            case "extends":
                return f"the prompt extends the row {place}: it adds {self.got}"
            case "shorter prompt":
                return f"the prompt ends {place}, before the row does: expected {self.expected} next"
            case "own token":
                what = "a token that was sampled (tokenized again, or edited)"
            case "special token":
                what = "a special token (the chat template wrote something else)"
            case "other token":
                what = "a token that was not sampled (an earlier message was rewritten)"
        return f"the prompt differs {place}, in {what}: expected {self.expected}, got {self.got}"


def explain(previous: Row | Turn, turn: Turn, tokenizer: Any = None) -> Explanation:
    """Where and why the prompt of a turn is no continuation of a row, or of a turn.

    Args:
        previous: what the prompt was expected to begin with.
        turn: whose prompt is compared.
        tokenizer: shows text instead of ids, and knows special tokens: ``decode`` and ``all_special_ids``. A break at
            a special token has the kind "special token" only with it.

    Returns:
        the kind: "extends"; "shorter prompt" if all of the prompt is in ``previous``; else by the token that differs:
        "special token" if it is one on either side, "own token" if it was sampled, "other token" if it was not.

    >>> print(explain(Turn([1, 2], [3, 4], [0.0, 0.0]), Turn([1, 2, 34, 5], [6], [0.0])))
    the prompt differs at token 2, after [1, 2], in a token that was sampled (tokenized again, or edited): expected
    [3, 4], got [34, 5]
    """
    expected, got = previous.token_ids, tuple(turn.prompt_ids)
    pairs = zip(expected, got, strict=False)
    shorter = min(len(expected), len(got))
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    special = set(getattr(tokenizer, "all_special_ids", ()))
    kind: Kind
    if position == len(expected):
        kind = "extends"
    elif position == len(got):
        kind = "shorter prompt"
    elif special & {expected[position], got[position]}:
        kind = "special token"
    else:
        kind = "own token" if _was_sampled(previous, position) else "other token"

    def text(ids: Sequence[int]) -> str:
        return str(list(ids)) if tokenizer is None else repr(tokenizer.decode(list(ids)))

    before = text(got[max(position - _CONTEXT, 0) : position])
    after = slice(position, position + _SHOWN)
    return Explanation(kind, position, before, text(expected[after]), text(got[after]))


def _was_sampled(previous: Row | Turn, position: int) -> bool:
    if isinstance(previous, Turn):
        return position >= len(previous.prompt_ids)
    return any(span.start <= position < span.stop for span in previous.spans)
