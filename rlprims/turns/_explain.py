"""The reason that a turn does not extend a row."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from rlprims.turns._turn import Row, Turn

Kind: TypeAlias = Literal["extends", "own token", "other token", "special token", "shorter prompt", "other image"]
_CONTEXT, _SHOWN = 8, 4
"""The number of tokens shown before the first difference, and from it on."""


class Explanation(NamedTuple):
    """How a prompt differs from an earlier row or turn. ``str()`` of it is a sentence."""

    kind: Kind
    position: int
    """The index of the first token that differs; if none does, the length of the shorter one."""
    before: str
    """The last tokens that both have."""
    expected: str
    """The first tokens of the earlier row or turn from the position on."""
    got: str
    """The first tokens of the prompt from the position on."""

    def __str__(self) -> str:
        place = f"at token {self.position}, after {self.before}"
        match self.kind:
            case "extends":
                return f"the prompt extends the row {place}: it adds {self.got}"
            case "shorter prompt":
                return f"the prompt ends {place}, before the row does: expected {self.expected} next"
            case "other image":
                return "the prompt has all tokens of the row, and other images"
            case "own token":
                token_kind = "a token that was sampled (tokenized again, or edited)"
            case "special token":
                token_kind = "a special token (the chat template wrote something else)"
            case "other token":
                token_kind = "a token that was not sampled (an earlier message was rewritten)"
        return f"the prompt differs {place}, in {token_kind}: expected {self.expected}, got {self.got}"


def explain(previous: Row | Turn, turn: Turn, tokenizer: Any = None) -> Explanation:
    """Compare the prompt of a turn with a row or turn that it should continue: where it differs, and why.

    Args:
        previous: the row or turn with which the prompt should begin.
        turn: the turn whose prompt is compared.
        tokenizer: with ``decode`` and ``all_special_ids``, to show text instead of ids and to find special tokens.
            Without it a difference at a special token has another kind.

    Returns:
        the kind: "extends"; "shorter prompt" if all of the prompt is in ``previous``; otherwise it depends on the token
        that differs: "special token" if it is one in either, "own token" if it was sampled, else "other token". It is
        "other image" if the prompt has all tokens of ``previous``, and other images.

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
        kind = "extends" if turn.images[: len(previous.images)] == previous.images else "other image"
    elif position == len(got):
        kind = "shorter prompt"
    elif special & {expected[position], got[position]}:
        kind = "special token"
    else:
        if isinstance(previous, Turn):
            sampled = position >= len(previous.prompt_ids)
        else:
            sampled = any(span.start <= position < span.stop for span in previous.spans)
        kind = "own token" if sampled else "other token"

    def text(ids: Sequence[int]) -> str:
        return str(list(ids)) if tokenizer is None else repr(tokenizer.decode(list(ids)))

    before = text(got[max(position - _CONTEXT, 0) : position])
    after = slice(position, position + _SHOWN)
    return Explanation(kind, position, before, text(expected[after]), text(got[after]))
