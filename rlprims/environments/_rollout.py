"""The driver of one episode of an environment with a sampler."""

import inspect
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlprims.ended import EndedName
from rlprims.environments._ask import Asker
from rlprims.environments._protocol import Completion, Environment, Message, Renderer, Sampler, Step
from rlprims.environments._tools import names_of
from rlprims.turns import Row, Turn, merge
from rlprims.turns.tokens import images_in

_START = "return [{'role': 'user', 'content': '...'}], or (messages, tools)"
_STEP = "return Step(messages=[{'role': 'tool', 'content': '...'}], reward=0.0, done=False)"


class EpisodeLimits(BaseModel):
    """Limits that end an episode before its environment is done."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    turns: int = Field(default=8, ge=1, description="messages of the model")
    tokens: int | None = Field(
        default=None, ge=1, description="tokens of a turn's prompt and completion; null: the context window"
    )
    sampled_tokens: int | None = Field(default=None, ge=1, description="sampled tokens of all turns; null: no limit")
    tool_calls: int | None = Field(default=None, ge=0, description="tool calls of all turns; null: no limit")
    seconds: float = Field(default=60.0, gt=0, description="seconds of all calls of the environment")
    characters: int = Field(default=100_000, ge=1, description="characters of the messages of one step")


@dataclass
class Episode:
    """The record of an episode."""

    sample_id: int
    turns: list[Turn] = field(default_factory=list)
    """The turns with their rewards; ``finish`` of the last turn is the reason why the episode ended."""
    states: list[Hashable] = field(default_factory=list)
    """The state before each turn: the environment's label, or the prompt."""
    messages: list[Message] = field(default_factory=list)
    columns: dict[str, float] = field(default_factory=dict)
    tool_calls: int = 0
    ended: EndedName = "stop"
    is_done: bool = False
    """Whether the environment ended the episode; the last reward is then the outcome."""
    causes: Counter[str] = field(default_factory=Counter)
    """Counts of problems: malformed calls, unknown tools, limits, failures of the environment."""
    failure: str | None = None
    """The reason why the environment failed and there is no score, and the fix."""

    @property
    def score(self) -> float:
        """The sum of the rewards; NaN if the environment failed."""
        return math.nan if self.failure else math.fsum(turn.reward for turn in self.turns)

    def rows(self) -> list[Row]:
        """The rows of training data, merged by exact prefixes."""
        return merge(self.turns)


class _EnvironmentError(Exception):
    """An environment's answer that cannot be used, with the reason of the end, the counted cause, and a message."""

    def __init__(self, ended: EndedName, cause: str, message: str) -> None:
        super().__init__(message)
        self.ended, self.cause = ended, cause


async def rollout(
    environment: Environment,
    sample: Sampler,
    renderer: Renderer,
    limits: EpisodeLimits | None = None,
    *,
    sample_id: int = 0,
) -> Episode:
    """Run an episode: environment and model send messages in turn, until the episode is done or a limit is reached.

    No text is tokenized twice: each prompt is the earlier tokens, as they were sampled, plus the new messages of the
    environment. If the chat template does not allow this, the whole conversation is rendered again, as another row.

    If the environment raises, takes too long, or returns a wrong value, only this episode fails: ``failure`` has the
    reason, ``score`` is NaN, and the turns before it are kept. An exception of ``sample`` is raised.

    Messages may have images if the renderer's method ``read_images`` makes them bytes, in parts of the messages.

    >>> import asyncio
    >>> class Echo:
    ...     def reset(self):
    ...         return [{"role": "user", "content": "say a"}]
    ...     def step(self, message):
    ...         return Step(reward=float(message["content"] == "a"), done=True)
    >>> class Letters:
    ...     def encode(self, text, **_):
    ...         return [ord(letter) for letter in text]
    ...     def decode(self, ids, **_):
    ...         return "".join(map(chr, ids))
    >>> def sample(prompt_ids, sample_id, turn):
    ...     return Completion([ord("a")], [-0.5])
    >>> from rlprims.environments import TextRenderer
    >>> episode = asyncio.run(rollout(Echo(), sample, TextRenderer(Letters())))
    >>> episode.score, episode.ended, [turn.sampled_ids for turn in episode.turns]
    (1.0, 'stop', [(97,)])
    """
    limits, episode = limits or EpisodeLimits(), Episode(sample_id)
    ask = Asker(limits.seconds)
    try:
        await _play(environment, sample, renderer, limits, episode, ask)
    except _EnvironmentError as error:
        episode.ended, episode.failure = error.ended, str(error)
        episode.causes[error.cause] += 1
    finally:
        close = getattr(environment, "close", None)
        if callable(close) and episode.ended != "timeout":
            try:
                await ask(close)
            except Exception:
                episode.causes["close raised"] += 1
        ask.close()
    if episode.turns:
        episode.turns[-1] = replace(episode.turns[-1], finish=episode.ended)
    return episode


async def _play(
    environment: Environment, sample: Sampler, renderer: Renderer, limits: EpisodeLimits, episode: Episode, ask: Asker
) -> None:
    name = getattr(environment, "__name__", type(environment).__qualname__)
    start = await _ask(ask, f"{name}.reset", environment.reset)
    messages, tools = _checked_start(name, start)
    _check_size(f"{name}.reset", messages, limits.characters)
    known = names_of(tools)
    prompt_ids, state = _render(renderer, episode, tools, None, messages), None
    while True:
        limited = [] if limits.tokens is None else [limits.tokens - len(prompt_ids)]
        if limits.sampled_tokens is not None:
            limited.append(limits.sampled_tokens - sum(len(turn.sampled_ids) for turn in episode.turns))
        left = min(limited, default=None)
        if left is not None and left < 1:
            full = limits.tokens is not None and limits.tokens <= len(prompt_ids)
            episode.ended = "context" if full else "length"
            episode.causes[f"limit: {'tokens' if full else 'sampled_tokens'}"] += 1
            return
        images = images_in(episode.messages)
        drawn = sample(prompt_ids, episode.sample_id, len(episode.turns), *[images] * bool(images))
        completion: Completion = await drawn if inspect.isawaitable(drawn) else drawn
        turn = replace(_turn(prompt_ids, completion, left), images=images)
        episode.turns.append(turn)
        episode.states.append((*prompt_ids, *images) if state is None else state)
        message = {**renderer.read(turn.sampled_ids, tools), "finish": turn.finish}
        episode.messages.append(message)
        calls, malformed = message.get("tool_calls", []), message.get("malformed_calls", [])
        episode.tool_calls += len(calls)
        episode.causes.update(["malformed call"] * len(malformed))
        episode.causes.update("unknown tool" for call in calls if call["function"]["name"] not in known)
        if limits.tool_calls is not None and episode.tool_calls > limits.tool_calls:
            episode.ended = "turns"
            episode.causes["limit: tool_calls"] += 1
            return

        step = await _ask(ask, f"{name}.step", environment.step, message)
        state = _checked_step(name, step, episode)
        episode.turns[-1] = replace(turn, reward=float(step.reward))
        if step.done:
            episode.is_done = True
            episode.ended = "parse_error" if malformed else turn.finish
            episode.messages += step.messages
            return
        _check_size(f"{name}.step", step.messages, limits.characters)
        # Malformed calls and unknown tools were counted above, even if the environment does not answer them.
        errors = [m["error"] for m in step.messages if m.get("error") not in (None, "malformed call", "unknown tool")]
        episode.causes.update(errors)
        if len(episode.turns) == limits.turns:
            episode.ended = "turns"
            episode.causes["limit: turns"] += 1
            return
        prompt_ids = _render(renderer, episode, tools, turn, step.messages)


def _render(
    renderer: Renderer, episode: Episode, tools: list[Any], turn: Turn | None, appended: Sequence[Message]
) -> list[int]:
    """The next prompt: the tokens of the turn and the appended messages, or the whole conversation."""
    try:
        appended = getattr(renderer, "read_images", _texts)(appended)
        delta = None if turn is None else renderer.delta(episode.messages, appended, tools, ended=turn.finish == "stop")
        episode.messages += appended
        return [*turn.token_ids, *delta] if turn and delta is not None else renderer.prompt(episode.messages, tools)
    except Exception as error:  # for example a chat template that requires user and assistant to alternate
        problem = f"the messages cannot be rendered ({type(error).__name__}: {error})"
        fix = "answer with messages that the model's chat template accepts"
        raise _EnvironmentError("error", "messages that cannot be rendered", f"{problem}: {fix}") from error


def _texts(messages: Sequence[Message]) -> Sequence[Message]:
    if any(isinstance(message["content"], list) for message in messages):
        raise ValueError("parts of images need has_images = True in the environment's class")
    return messages


async def _ask(ask: Asker, called: str, method: Any, *args: Any) -> Any:
    try:
        return await ask(method, *args)
    except TimeoutError as error:
        if str(error):  # the environment's own
            raise _EnvironmentError("timeout", f"{called} raised TimeoutError", f"{called} raised {error!r}") from None
        limit = f"the limit of {ask.seconds:g} seconds for all calls of an episode"
        problem = f"{called} took longer than {limit}: end calls that wait, or raise episode_limits.seconds"
        raise _EnvironmentError("timeout", f"{called} took too long", problem) from None
    except Exception as error:
        cause = f"{called} raised {type(error).__name__}"
        raise _EnvironmentError("error", cause, f"{cause}: {error}; catch it, or return Step(done=True)") from error


def _wrong(called: str, got: str, write: str) -> _EnvironmentError:
    return _EnvironmentError("error", f"{called} returned a wrong value", f"{called} returned {got}: {write}")


def _checked_start(name: str, start: Any) -> tuple[list[Message], list[Any]]:
    called = f"{name}.reset"
    messages, tools = start, list[Any]()
    if isinstance(start, tuple) and len(start) == 2 and not isinstance(start[0], Mapping):
        messages, tools = start
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise _wrong(called, f"tools of type {type(tools).__name__}", f"expected a list, {_START}")
    try:
        names_of(tools)
    except (TypeError, KeyError, AttributeError):
        raise _wrong(called, f"tools {tools!r:.80}", "expected tools from rlprims.environments.tool") from None
    _check_messages(called, messages, _START)
    if not messages:
        raise _wrong(called, "no messages", _START)
    return list(messages), list(tools)


def _checked_step(name: str, step: Any, episode: Episode) -> Hashable:
    """The label of the next state. The columns are added to the episode."""
    called = f"{name}.step"
    if not isinstance(step, Step):
        raise _wrong(called, f"{type(step).__name__}", _STEP)
    if not isinstance(step.reward, Real) or not math.isfinite(step.reward):
        raise _wrong(called, f"the reward {step.reward!r:.80}", "expected a finite number")
    if not isinstance(step.done, bool):
        raise _wrong(called, f"done={step.done!r:.80}", "expected True or False")
    _check_messages(called, step.messages, _STEP)
    if not step.messages and not step.done:
        raise _wrong(called, "no messages, and is not done", f"{_STEP}, or done=True")
    if not isinstance(step.columns, Mapping):
        raise _wrong(called, f"columns of type {type(step.columns).__name__}", "expected a dict of numbers")
    columns = dict(step.columns)
    state = columns.pop("state", None)
    for key, value in columns.items():
        if not isinstance(key, str) or not isinstance(value, Real):
            got = f"columns[{key!r:.40}]={value!r:.40}"
            raise _wrong(called, got, "expected a number under a name, or leave it out")
        episode.columns[key] = float(value)
    if not isinstance(state, Hashable):
        raise _wrong(called, f"columns['state'] of type {type(state).__name__}", "expected a label that can be hashed")
    return state


def _check_messages(called: str, messages: Any, write: str) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise _wrong(called, f"messages of type {type(messages).__name__}", f"expected a list: {write}")
    for message in messages:
        if not isinstance(message, Mapping):
            raise _wrong(called, f"a message of type {type(message).__name__}", f"expected a dict: {write}")
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str | list):
            raise _wrong(called, f"the message {dict(message)!r:.80}", "expected role and content, both text or parts")


def _check_size(called: str, messages: Sequence[Message], most: int) -> None:
    contents = [m["content"] if isinstance(m["content"], list) else [{"text": m["content"]}] for m in messages]
    texts = [part.get("text") for content in contents for part in content if isinstance(part, Mapping)]
    if (size := sum(len(text) for text in texts if isinstance(text, str))) > most:
        problem = f"{called} returned {size} characters, more than the limit of {most}: shorten them"
        raise _EnvironmentError("context", f"{called} returned too much", problem)


def _turn(prompt_ids: Sequence[int], completion: Completion, left: int | None) -> Turn:
    """The drawn tokens, cut at the limits; a prefix of a sample is a valid sample."""
    cut, version = left is not None and len(completion.token_ids) > left, completion.version
    return Turn(
        prompt_ids,
        completion.token_ids[:left],
        completion.log_probs[:left],
        version=version if isinstance(version, int) else version[:left],
        finish="length" if cut else completion.finish,
        trainable=completion.trainable if isinstance(completion.trainable, bool) else completion.trainable[:left],
        extras={} if completion.kept is None else {"kept": completion.kept[:left]},
    )
