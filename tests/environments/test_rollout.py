"""Episodes: what the driver keeps, when it ends them, and what a bad environment costs."""

import asyncio
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlprims.environments import Completion, Episode, EpisodeLimits, Step, TextRenderer, answer_calls, rollout, tool
from tests.environments.letters import END, Letters, random_text, says

USER = {"role": "user", "content": "3+4="}


def play(environment: Any, sample: Any = None, limits: EpisodeLimits | None = None, sample_id: int = 0) -> Episode:
    renderer = TextRenderer(Letters())
    return asyncio.run(rollout(environment, sample or says("7"), renderer, limits, sample_id=sample_id))


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Adds:
    """Two turns: a call, then the answer."""

    def reset(self) -> Any:
        return [USER], [tool(add)]

    def step(self, message: Any) -> Step:
        if answers := answer_calls(message, [tool(add)]):
            return Step(answers, reward=0.25)
        return Step(reward=float(message["content"] == "7"), done=True, columns={"acc": message["content"] == "7"})


CALL = "<add><a>3</a><b>4</b></add>"


def test_a_tool_is_called_and_its_answer_read() -> None:
    episode = play(Adds(), says(CALL, "7"))
    assert [m["content"] for m in episode.messages] == ["3+4=", "", "7", "7"]
    assert episode.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": "3", "b": "4"}}
    assert episode.score == 1.25
    assert [turn.reward for turn in episode.turns] == [0.25, 1.0]
    assert (episode.columns, episode.tool_calls, episode.ended, episode.is_done) == ({"acc": 1.0}, 1, "stop", True)
    assert not episode.causes
    [row] = episode.rows()
    text = "3+4=" + CALL + "\0" + "7" + "7\0"  # what was sampled, with its ends, and the answer of the tool as it came
    assert row.token_ids == tuple(map(ord, text))
    assert [i for i, sampled in enumerate(row.response_mask) if not sampled][-1] == text.index("\0") + 1
    assert [i for i, reward in enumerate(row.rewards) if reward] == [text.index("\0"), len(text) - 1]


def test_an_async_environment_with_an_async_sampler_plays_the_same_episode() -> None:
    class Async(Adds):
        async def reset(self) -> Any:
            await asyncio.sleep(0)
            return super().reset()

        async def step(self, message: Any) -> Step:
            await asyncio.sleep(0)
            return super().step(message)

    async def sample(*args: Any) -> Completion:
        await asyncio.sleep(0)
        return says(CALL, "7")(*args)

    assert play(Async(), sample) == play(Adds(), says(CALL, "7"))


def test_the_sampler_is_asked_by_sample_and_turn() -> None:
    asked = []

    def sample(prompt_ids: Sequence[int], sample_id: int, turn: int) -> Completion:
        asked.append((sample_id, turn))
        return says(CALL, CALL, "7")(prompt_ids, sample_id, turn)

    play(Adds(), sample, sample_id=11)
    assert asked == [(11, 0), (11, 1), (11, 2)]


def test_a_plain_environment_has_one_thread_for_all_of_its_calls() -> None:
    class Threads(Adds):
        seen: list[Any]

        def reset(self) -> Any:
            self.seen = [threading.get_ident()]
            return super().reset()

        def step(self, message: Any) -> Step:
            self.seen.append(threading.get_ident())
            return super().step(message)

        def close(self) -> None:
            self.seen.append(threading.get_ident())

    environment = Threads()
    play(environment, says(CALL, "7"))
    assert len(environment.seen) == 4
    assert len(set(environment.seen)) == 1
    assert environment.seen[0] != threading.get_ident()


# Limits.


class Endless:
    def reset(self) -> Any:
        return [USER], [tool(add)]

    def step(self, message: Any) -> Step:
        return Step([{"role": "user", "content": "more"}], reward=1.0)


@pytest.mark.parametrize(
    ("limits", "ended", "cause", "turns", "sampled"),
    [
        ({"turns": 3}, "turns", "limit: turns", 3, 6),
        ({"sampled_tokens": 5}, "length", "limit: sampled_tokens", 3, 5),  # the third turn is cut to one token
        ({"tokens": 14}, "context", "limit: tokens", 2, 4),  # 4, and then 2 + 4 with each turn: 4+2+4+2 = 12, 16
        ({"tokens": 4}, "context", "limit: tokens", 0, 0),  # the first prompt has 4
    ],
)
def test_an_episode_that_never_ends_ends_at_a_limit(
    limits: dict[str, int], ended: str, cause: str, turns: int, sampled: int
) -> None:
    episode = play(Endless(), limits=EpisodeLimits(**limits))
    assert (episode.ended, dict(episode.causes), len(episode.turns)) == (ended, {cause: 1}, turns)
    assert sum(len(turn.sampled_ids) for turn in episode.turns) == sampled
    assert episode.failure is None
    assert episode.score == turns
    assert not episode.is_done
    assert all(turn.finish == ended for turn in episode.turns[-1:])


def test_a_turn_over_the_limit_of_calls_is_not_answered() -> None:
    episode = play(Adds(), says(CALL), EpisodeLimits(tool_calls=2))
    assert (episode.ended, len(episode.turns), episode.tool_calls) == ("turns", 3, 3)
    assert episode.causes == {"limit: tool_calls": 1}
    assert episode.score == 0.5


# What the model does wrong is a turn with a cause, and the episode goes on.


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("<add><a>3", "malformed call"),
        ("<add>3</add>", "wrong arguments"),
        ("<add><a>x</a><b>4</b></add>", "wrong arguments"),
    ],
)
def test_a_bad_call_is_a_turn_with_a_cause(text: str, cause: str) -> None:
    episode = play(Adds(), says(text, "7"))
    assert episode.causes == {cause: 1}
    assert episode.messages[2]["content"].startswith(cause)
    assert (len(episode.turns), episode.failure, episode.columns["acc"]) == (2, None, 1.0)


def test_an_unknown_tool_and_a_tool_that_raises_are_answered() -> None:
    class Divides:
        def reset(self) -> Any:
            return [USER], [tool(divide), tool(other)]

        def step(self, message: Any) -> Step:
            answers = answer_calls(message, [tool(divide)])
            return Step(answers, done=not answers)

    def divide(x: float) -> float:
        """One by x."""
        return 1 / x

    def other() -> str:
        """Not among the tools that the environment runs."""
        return ""

    episode = play(Divides(), says("<divide>0</divide>", "<other></other>", "0"))
    assert [m["content"] for m in episode.messages if m["role"] == "tool"] == [
        "ZeroDivisionError: float division by zero",
        "unknown tool 'other'; the tools are: divide",
    ]
    assert episode.causes == {"tool raised": 1}


def test_an_unknown_tool_is_counted() -> None:
    renderer, call = TextRenderer(Letters(), calls="json"), '<tool_call>{"name": "sub"}</tool_call>'
    episode = asyncio.run(rollout(Adds(), says(call, "7"), renderer))
    assert episode.causes == {"unknown tool": 1}
    assert episode.messages[2]["content"] == "unknown tool 'sub'; the tools are: add"
    assert episode.score == 1.25


# What the environment does wrong costs its episode, and says what to write.


class Bad:
    def __init__(self, start: Any = ([USER],), answer: Any = None) -> None:
        self.start, self.answer = start, answer

    def reset(self) -> Any:
        return self._give(self.start[0])

    def step(self, message: Any) -> Any:
        return self._give(self.answer)

    def _give(self, value: Any) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value


@pytest.mark.parametrize(
    ("environment", "ended", "says_so"),
    [
        (Bad(answer=ValueError("no such file")), "error", "Bad.step raised ValueError: no such file"),
        (Bad(answer=SystemExit(3)), "error", "SystemExit: 3"),
        (Bad(answer=KeyboardInterrupt()), "error", "KeyboardInterrupt"),
        (Bad(answer=StopIteration()), "error", "Bad.step raised"),
        (Bad(answer=None), "error", "Bad.step returned NoneType: return Step("),
        (Bad(answer={"done": True}), "error", "returned dict: return Step("),
        (Bad(answer=Step()), "error", "no messages, and is not done"),
        (Bad(answer=Step([USER], reward=math.nan)), "error", "the reward nan: expected a finite number"),
        (Bad(answer=Step([USER], reward="1")), "error", "the reward '1'"),
        (Bad(answer=Step(done="no")), "error", "done='no': expected True or False"),
        (Bad(answer=Step("done")), "error", "messages of type str"),
        (Bad(answer=Step([{"role": "tool"}])), "error", "expected role and content, both text"),
        (Bad(answer=Step([("tool", "4")])), "error", "a message of type tuple"),
        (Bad(answer=Step(done=True, columns={"acc": "yes"})), "error", "columns['acc']='yes'"),
        (Bad(answer=Step(done=True, columns={"state": []})), "error", "columns['state'] of type list"),
        (Bad(answer=Step([{"role": "tool", "content": "x" * 2**20}])), "context", "returned 1048576 characters"),
        (Bad(start=([],)), "error", "Bad.reset returned no messages"),
        (Bad(start=("hello",)), "error", "messages of type str"),
        (Bad(start=(([USER], [add]),)), "error", "expected tools from rlprims.environments.tool"),
        (Bad(start=(OSError("down"),)), "error", "Bad.reset raised OSError: down"),
    ],
)
def test_a_bad_environment_costs_its_episode_and_says_what_to_write(environment: Any, ended: str, says_so: str) -> None:
    episode = play(environment)
    assert episode.ended == ended
    assert says_so in (episode.failure or "")
    assert math.isnan(episode.score)
    assert sum(episode.causes.values()) == 1
    assert [turn.finish for turn in episode.turns[-1:]] == [ended] * len(episode.turns[-1:])


@pytest.mark.slow
def test_one_that_hangs_costs_its_episode_and_not_the_others() -> None:
    class Waits:
        async def reset(self) -> Any:
            return [USER]

        async def step(self, message: Any) -> Step:
            await asyncio.Event().wait()
            raise AssertionError

    class Refuses(Waits):
        async def step(self, message: Any) -> Step:
            for _ in range(50):  # it does not let itself be cancelled
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    continue
            raise AssertionError

    released = threading.Event()

    class Blocks:
        def reset(self) -> Any:
            return [USER]

        def step(self, message: Any) -> Step:
            released.wait(60)
            raise AssertionError

    async def all_of_them() -> list[Episode]:
        environments: list[Any] = [Waits(), Refuses(), Blocks(), Adds()]
        renderer, limits = TextRenderer(Letters()), EpisodeLimits(seconds=0.3)
        return list(await asyncio.gather(*(rollout(e, says("7"), renderer, limits) for e in environments)))

    *hung, well = asyncio.run(all_of_them())
    released.set()
    assert [episode.ended for episode in hung] == ["timeout"] * 3
    assert all("took longer than the limit of 0.3 seconds" in str(episode.failure) for episode in hung)
    assert (well.score, well.failure) == (1.0, None)


def test_the_time_of_the_sampler_is_not_the_environments() -> None:
    def slow(*args: Any) -> Completion:
        time.sleep(0.8)
        return says("7")(*args)

    assert play(Adds(), slow, EpisodeLimits(seconds=0.7)).failure is None


def test_an_episode_raises_the_samplers_error_and_closes_its_environment() -> None:
    closed = []

    class Closes(Adds):
        def close(self) -> None:
            closed.append(True)

    def fails(*args: Any) -> Completion:
        raise RuntimeError("the engine is lost")

    with pytest.raises(RuntimeError, match="the engine is lost"):
        play(Closes(), fails)
    assert closed == [True]


def test_messages_that_a_template_refuses_cost_the_episode() -> None:
    class Strict(TextRenderer):
        def delta(self, *args: Any, **options: Any) -> Any:
            raise ValueError("roles must alternate")

    episode = asyncio.run(rollout(Endless(), says("7"), Strict(Letters())))
    assert episode.ended == "error"
    assert "roles must alternate" in str(episode.failure)


# The reconstruction law.


class Random:
    """Any number of messages, rewards and states, a function of its seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def reset(self) -> Any:
        return self._messages(1)

    def step(self, message: Any) -> Step:
        done = bool(self.rng.integers(4) == 0)
        reward = float(self.rng.integers(-2, 3))
        return Step([] if done else self._messages(int(self.rng.integers(1, 3))), reward, done)

    def _messages(self, count: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "xyz"[: int(self.rng.integers(1, 4))]} for _ in range(count)]


class Rewrites(TextRenderer):
    """Sometimes the history cannot be continued, and is rendered anew."""

    def delta(self, messages: Any, appended: Any, tools: Any, *, ended: bool) -> list[int] | None:
        return None if len(messages) % 3 == 0 else super().delta(messages, appended, tools, ended=ended)


@given(seed=st.integers(0, 2**32 - 1), turns=st.integers(1, 6), rewrites=st.booleans())
@settings(max_examples=60, deadline=None)
def test_rows_of_an_episode_hold_each_sampled_token_once_after_what_the_sampler_saw(
    seed: int, turns: int, rewrites: bool
) -> None:
    asked = dict[int, tuple[int, ...]]()

    def sample(prompt_ids: Sequence[int], sample_id: int, turn: int) -> Completion:
        asked[turn] = tuple(prompt_ids)
        return random_text(prompt_ids, sample_id, turn)

    renderer = (Rewrites if rewrites else TextRenderer)(Letters())
    episode = asyncio.run(rollout(Random(seed), sample, renderer, EpisodeLimits(turns=turns), sample_id=seed))
    rows = episode.rows()
    spans = {span.turn: (row, span) for row in rows for span in row.spans}
    assert sorted(spans) == sorted(asked) == list(range(len(episode.turns)))
    for number, (row, span) in spans.items():
        drawn = random_text(asked[number], seed, number)
        assert row.token_ids[: span.start] == asked[number]
        assert row.token_ids[span.start : span.stop] == tuple(drawn.token_ids)
        assert row.rollout_log_probs[span.start : span.stop] == tuple(drawn.log_probs)
        assert set(row.versions[span.start : span.stop]) == {number}
    assert sum(sum(row.response_mask) for row in rows) == sum(len(turn.sampled_ids) for turn in episode.turns)
    assert math.isclose(sum(sum(row.rewards) for row in rows), episode.score)
    if not rewrites:
        assert len(rows) == 1
        said = "".join(m["content"] for m in episode.messages if m["role"] == "user")
        known = [i for i, sampled in zip(rows[0].token_ids, rows[0].response_mask, strict=True) if not sampled]
        heard = Letters().decode(known)
        assert said.startswith(heard)
        assert END not in known
