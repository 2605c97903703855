"""A turn with the sampler's exact ids, and a row of training data merged from turns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, NamedTuple

from rlprims.ended import Ended, EndedName


@dataclass(frozen=True)
class Turn:
    """One call of the sampler: the exact ids that it was given and the exact ids that it drew, without text.

    Sequences may be lists, tuples, arrays or tensors; they are stored as tuples. A log-prob may be NaN or infinite,
    because real samplers report such numbers. It stays with its token; ``filters.finite_tokens`` can drop it.

    Args:
        prompt_ids: all tokens before the sampled ones: the conversation so far and the generation prompt.
        sampled_ids: the ids that the sampler drew, with the end token if it was drawn. May be empty.
        log_probs: the sampler's log-prob of each sampled id, nats.
        version: of the weights: one number, or one per sampled id if the weights changed during the turn.
        finish: why sampling ended, a name of :class:`rlprims.ended.Ended`. The end token is missing for all but "stop".
        reward: the reward of this turn. It is put on the last sampled token.
        trainable: False if no token of the turn is to be trained; or one bool per sampled id, for example False on
            tokens that were forced and not drawn.
        agent: turns of different agents never share a row.
        extras: more columns, such as routed experts. Each has one entry per sampled id, or one per id of prompt and
            sampled ids together. The entries of ``kept`` are the ids that top-k, top-p or min-p left, including the
            sampled one, or ~v of those left out; None if the whole vocabulary was left.
        images: of the whole prompt, encoded, in the order of their placeholders.

    Raises:
        ValueError: lengths differ, ids are not integers, or ``finish`` is not a name of ``Ended``.

    >>> turn = Turn([1, 2], [3, 4], [-0.5, -0.1], version=7)
    >>> turn.token_ids
    (1, 2, 3, 4)
    >>> Turn([1, 2], [3, 4], [-0.5])
    Traceback (most recent call last):
    ...
    ValueError: log_probs has 1 entries, expected 2: one for each of sampled_ids
    """

    prompt_ids: Sequence[int]
    sampled_ids: Sequence[int]
    log_probs: Sequence[float]
    version: int | Sequence[int] = 0
    finish: EndedName = "stop"
    reward: float = 0.0
    trainable: bool | Sequence[bool] = True
    agent: str = "main"
    extras: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    images: Sequence[bytes] = ()

    def __post_init__(self) -> None:
        store = object.__setattr__  # the class is frozen
        for name in ("prompt_ids", "sampled_ids"):
            store(self, name, _ids(name, getattr(self, name)))
        for name in ("log_probs", "version", "trainable"):
            store(self, name, _plain(getattr(self, name)))
        store(self, "images", tuple(self.images))
        Ended.from_label(self.finish)
        sampled, total = len(self.sampled_ids), len(self.prompt_ids) + len(self.sampled_ids)
        for name in ("log_probs", "version", "trainable"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != sampled:
                raise ValueError(f"{name} has {len(value)} entries, expected {sampled}: one for each of sampled_ids")
        if not isinstance(self.log_probs, tuple) or None in self.log_probs:
            raise ValueError("log_probs is or contains None, expected numbers; use NaN if the sampler gave none")
        for name, column in self.extras.items():
            if len(column) not in (sampled, total):
                raise ValueError(
                    f"extras[{name!r}] has {len(column)} entries, expected {sampled}, one for each of sampled_ids, or "
                    f"{total}, one for each of prompt_ids and sampled_ids: add an entry for a token that has none"
                )
        self._check_kept()

    def _check_kept(self) -> None:
        sets = self.extras.get("kept")
        if sets is None:
            return
        sampled_sets = sets[len(sets) - len(self.sampled_ids) :]
        for i, (sampled, kept) in enumerate(zip(self.sampled_ids, sampled_sets, strict=True)):
            ids = [] if kept is None else list(kept)
            if ids and (~sampled in ids if ids[0] < 0 else sampled not in ids):
                raise ValueError(
                    f"sampled_ids[{i}] is {sampled}, which is not in its kept set of {len(ids)} ids: expected the "
                    "set that the token was drawn from; use the sampler's set, and do not filter the logits again"
                )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and sampled ids. The next prompt begins with them, unless the conversation was rewritten."""
        return (*self.prompt_ids, *self.sampled_ids)


class Span(NamedTuple):
    """The place of a turn's sampled tokens in a row: ``token_ids[start:stop]``."""

    turn: int
    start: int
    stop: int


@dataclass(frozen=True)
class Row:
    """One sequence of training data. All columns have one entry per token of ``token_ids``.

    ``response_mask`` is True on tokens to train on. ``rollout_log_probs`` and ``versions`` are those of the sampled
    tokens, and 0 on the others; only the mask says which tokens were sampled. ``turn_ids`` is the number of the turn
    that added the token, in its prompt or as a sampled one. Entries of ``extras`` are None for tokens without one.
    """

    token_ids: tuple[int, ...]
    response_mask: tuple[bool, ...]
    rollout_log_probs: tuple[float, ...]
    rewards: tuple[float, ...]
    turn_ids: tuple[int, ...]
    versions: tuple[int, ...]
    extras: Mapping[str, tuple[Any, ...]]
    spans: tuple[Span, ...]
    """The places of the turns' sampled tokens, in order."""
    agent: str
    finish: EndedName
    """Why the last turn ended."""
    images: tuple[bytes, ...] = ()
    """In the order of their placeholders."""

    @property
    def observation_mask(self) -> tuple[bool, ...]:
        """True on tokens that were not sampled, that is, all tokens of prompts."""
        sampled = {place for span in self.spans for place in range(span.start, span.stop)}
        return tuple(place not in sampled for place in range(len(self.token_ids)))

    @property
    def prompt_length(self) -> int:
        """The index of the first sampled token; the number of tokens if nothing was sampled."""
        return next((span.start for span in self.spans if span.stop > span.start), len(self.token_ids))


def per_token(value: Any, count: int) -> Sequence[Any]:
    """The entries of a sequence, or one value ``count`` times."""
    return value if isinstance(value, tuple) else (value,) * count


def _plain(value: Any) -> Any:
    """A sequence, array or tensor as a tuple of Python numbers; a single number unchanged."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(value) if isinstance(value, Sequence) else value


def _ids(name: str, value: Any) -> tuple[int, ...]:
    ids = _plain(value)
    try:
        if not isinstance(ids, tuple):
            raise TypeError
        return ids if set(map(type, ids)) <= {int} else tuple(map(index, ids))
    except TypeError:
        raise ValueError(f"{name} is {str(value)[:60]}, expected a sequence of integers: tokenize text first") from None
