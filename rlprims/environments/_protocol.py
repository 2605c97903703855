"""The protocols of environments, samplers and renderers, and their results."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from rlprims.ended import EndedName

Message: TypeAlias = Mapping[str, Any]
"""A message as in chat templates: ``role`` and ``content``, both text. With images the content is a list of parts,
``{"type": "text", "text": ...}`` and ``{"type": "image", "image": ...}``. A message of the model also has
``tool_calls``, a list of ``{"type": "function", "function": {"name": ..., "arguments": {...}}}``; ``malformed_calls``,
a list of the errors of calls that could not be parsed; and ``finish``, the reason why sampling ended."""

FirstMessages: TypeAlias = Sequence[Message] | tuple[Sequence[Message], Sequence[Any]]
"""The first messages; or the first messages and the tools, from :func:`tool` or as schemas for chat templates."""


@dataclass(frozen=True)
class Step:
    """The answer of an environment to a message of the model.

    >>> Step([{"role": "tool", "content": "23"}])
    Step(messages=[{'role': 'tool', 'content': '23'}], reward=0.0, done=False, columns={})
    >>> Step(reward=1.0, done=True, columns={"acc": 1.0}).done
    True
    """

    messages: Sequence[Message] = ()
    """The next messages for the model; required unless ``done``."""
    reward: float = 0.0
    """The reward of the model's message. A rollout's score is the sum of its rewards."""
    done: bool = False
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Numbers to log, such as ``acc``; the last one of each name is kept. ``state`` is not logged: it is a hashable
    label of the state before the model's next message. Without it the state is the whole conversation so far."""


class Environment(Protocol):
    """One episode. It takes and returns messages; the driver converts them to tokens. Both methods may be ``async``.

    A plain ``def`` runs in a separate thread, one for each episode, so it may block. An ``async def`` shares its thread
    with other episodes, so it must not block. ``close()``, if it exists, is called after every episode, failed or not.
    """

    def reset(self) -> FirstMessages | Awaitable[FirstMessages]:
        """The first messages, and the tools if there are any."""
        ...

    def step(self, message: Message) -> Step | Awaitable[Step]:
        """The answer to the model's message."""
        ...


@dataclass(frozen=True)
class Completion:
    """The tokens that a sampler drew after a prompt."""

    token_ids: Sequence[int]
    """The drawn ids, including the end token if it was drawn."""
    log_probs: Sequence[float]
    finish: EndedName = "stop"
    """``stop``: the end token or a stop text; ``length``: the limit of a completion's tokens."""
    version: int | Sequence[int] = 0
    """The version of the weights; one number per token if they changed during the completion."""
    kept: Sequence[Any] | None = None
    """For each token the ids that it was drawn from; of negative ones, ~v were left out."""
    trainable: bool | Sequence[bool] = True
    """False for a token that was forced and not drawn, such as the end of a thinking budget."""


Sampler: TypeAlias = Callable[..., Completion | Awaitable[Completion]]
"""A sampler, plain or ``async``, of (prompt_ids, sample_id, turn), and of the prompt's images if it has any. Its draw
depends on its own seed and the two numbers."""


class Renderer(Protocol):
    """Converts messages to token ids and back: :class:`TextRenderer`, :class:`ChatRenderer`."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """The ids of a conversation, up to the model's next token."""
        ...

    def delta(
        self, messages: Sequence[Message], appended: Sequence[Message], tools: Sequence[Any], *, ended: bool
    ) -> list[int] | None:
        """The ids after the last sampled one, as :func:`rlprims.turns.delta_ids`; None: render the conversation."""
        ...

    def read(self, token_ids: Sequence[int], tools: Sequence[Any]) -> Message:
        """The assistant's message, with its calls if there are tools."""
        ...
