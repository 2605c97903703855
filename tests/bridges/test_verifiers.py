"""Environments of verifiers played here, and ours played there, with the real package.

``make test-bridges VERIFIERS=verifiers`` installs it; without it these tests are skipped.
"""

import asyncio
import math
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from rlprims._event_loop import event_loop
from rlprims.environments import (
    Completion,
    Episode,
    EpisodeLimits,
    FirstMessages,
    Message,
    Step,
    TextRenderer,
    answer_calls,
    rollout,
)
from rlprims.environments import tool as as_tool
from rlprims.interop.verifiers import Verifiers, rows, to_verifiers
from tests.bridges.test_bridges import Letters, no_failures, played, trained
from tests.bridges.test_bridges import model as model

pytestmark = pytest.mark.bridges
vf = pytest.importorskip("verifiers")
pytest.importorskip("verifiers.envs.environment", reason="verifiers 0.4 has no environments in the process")
HERE = "tests.bridges.verifiers_environments"


def contents(episode: Episode) -> list[str]:
    return [message["content"] for message in episode.messages]


def tasks() -> set[Any]:
    """Those that still run in the loop of the episodes."""

    async def all_tasks() -> set[Any]:
        return asyncio.all_tasks() - {asyncio.current_task()}

    return asyncio.run_coroutine_threadsafe(all_tasks(), event_loop("verifiers")).result()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    from tests.bridges.verifiers_environments import LIVE

    assert not LIVE
    assert not tasks()
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_a_question() -> None:
    episode = played(Verifiers(f"{HERE}.question", 1), " 7")
    assert (episode.failure, episode.score, episode.ended) == (None, 1.5, "stop")
    assert episode.columns == {"right": 1.0, "brief": 1.0, "num_turns": 1.0}
    assert contents(episode) == ["Calculate.", "3+4", " 7"]
    assert [message["role"] for message in episode.messages] == ["system", "user", "assistant"]
    wrong = played(Verifiers(f"{HERE}.question", 1), "It is 4")
    assert (wrong.score, wrong.columns["right"]) == (0.0, 0.0)


def test_the_data_to_evaluate_on_and_a_name_that_verifiers_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.bridges import verifiers_environments

    monkeypatch.setitem(sys.modules, "a_question", verifiers_environments)
    assert played(Verifiers("owner/a-question", 0, "eval"), "4").score == 1.5


def test_an_environment_that_verifiers_brings_along() -> None:
    pytest.importorskip("reasoning_gym")
    settings = {"gym": "basic_arithmetic", "num_train_examples": 4, "num_eval_examples": 2}

    def answered(answer: str) -> Episode:
        return played(Verifiers("verifiers.ReasoningGymEnv", 2, options=settings), f"<answer>{answer}</answer>")

    right, wrong = answered("3"), answered("5")
    assert contents(right)[1] == "Calculate 2 - -1."
    assert (right.failure, right.columns["check_answer_reward_func"], wrong.columns["check_answer_reward_func"]) == (
        None,
        1.0,
        0.0,
    )
    assert right.score - wrong.score == 1.0


def test_several_turns() -> None:
    episode = played(Verifiers(f"{HERE}.guess", 7), "1", "7")
    assert (episode.failure, episode.score, len(episode.turns)) == (None, 1.0, 2)
    assert [turn.reward for turn in episode.turns] == [0.0, 1.0]
    assert contents(episode) == ["a digit, 7", "1", "not 1", "7"]
    assert episode.columns == {"found": 1.0, "num_turns": 2.0}
    never = played(Verifiers(f"{HERE}.guess", 7), "1", "2", "3")
    assert (never.score, never.is_done, never.columns["num_turns"]) == (0.0, True, 3.0)
    longer = Verifiers(f"{HERE}.guess", 7, options={"max_turns": 6})
    assert played(longer, "1", "2", "3", "4", "7").score == 1.0


def test_tools() -> None:
    environment = Verifiers(f"{HERE}.shop", 0)
    messages, tools = asyncio.run(environment.reset())
    asyncio.run(environment.close())
    assert messages == [{"role": "user", "content": "Two apples cost?"}]
    assert [each["function"]["name"] for each in tools] == ["price"]
    assert tools[0]["function"]["parameters"]["properties"]["item"]["type"] == "string"
    episode = played(Verifiers(f"{HERE}.shop", 0), "<price>apple</price><price>plum</price>", "60")
    assert (episode.failure, episode.score, episode.tool_calls) == (None, 1.0, 2)
    assert contents(episode) == ["Two apples cost?", "", "30", "'plum'", "60"]
    assert [message["role"] for message in episode.messages[2:4]] == ["tool", "tool"]
    assert episode.columns == {"right": 1.0, "num_turns": 2.0, "total_tool_calls": 2.0, "price_calls": 2.0}
    unclosed = played(Verifiers(f"{HERE}.shop", 0), "<price>apple")
    assert (unclosed.failure, unclosed.score, unclosed.ended) == (None, 0.0, "parse_error")


def test_an_error_costs_its_episode() -> None:
    crashed = played(Verifiers(f"{HERE}.guess", 7), "crash", "7")
    assert (crashed.ended, math.isnan(crashed.score)) == ("error", True)
    assert "RuntimeError: the die rolled away" in str(crashed.failure)
    gave_up = played(Verifiers(f"{HERE}.guess", 7), "give up", "7")
    assert "ended with an error: " in str(gave_up.failure)
    assert "no die" in str(gave_up.failure)
    assert "cancelled its own rollout" in str(played(Verifiers(f"{HERE}.guess", 7), "cancel", "7").failure)
    forgot = played(Verifiers(f"{HERE}.forgets", 0), "1", "2")
    assert "do not continue the 2 before, expected these unchanged and new ones" in str(forgot.failure)
    for name, index, why in [
        ("guess", 10, "expected an index below 10, its rows, got 10"),
        ("compares", 0, "compares the rollouts of a group"),
        ("PRICES.copy", 0, "cannot import"),
    ]:
        assert why in str(played(Verifiers(f"{HERE}.{name}", index), "1").failure)
    assert played(Verifiers(f"{HERE}.guess", 7), "7").score == 1.0  # the same environment, later


def test_time_limit_of_a_verifiers_environment_ends_while_the_model_writes() -> None:
    async def sample(*_: Any) -> Completion:
        await asyncio.sleep(0.5)
        return Completion([ord("7")], [-0.5])

    late = Verifiers(f"{HERE}.guess", 7, options={"timeout": 0.1})
    episode = asyncio.run(rollout(late, sample, TextRenderer(Letters())))
    assert episode.ended == "timeout"
    assert "reached its timeout_seconds, which include the model's time: raise it" in str(episode.failure)


def test_many_at_the_same_time() -> None:
    async def all_of_them() -> list[Episode]:
        async def sample(prompt_ids: Any, sample_id: int, turn: int) -> Completion:
            await asyncio.sleep(0.01 * (sample_id % 3))
            return Completion([ord(str(sample_id % 10 if turn else 0))], [-0.5])

        return await asyncio.gather(
            *(
                rollout(Verifiers(f"{HERE}.guess", i % 10), sample, TextRenderer(Letters()), sample_id=i)
                for i in range(30)
            )
        )

    episodes = asyncio.run(all_of_them())
    assert [episode.score for episode in episodes] == [1.0] * 30
    assert [len(episode.turns) for episode in episodes] == [1 if i % 10 == 0 else 2 for i in range(30)]


def test_cancellation_and_limits_leave_no_task() -> None:
    """The fixture looks; here an episode is cancelled while the model writes, and one ended by a limit."""
    began = asyncio.Event()

    async def sample(*_: Any) -> Completion:
        began.set()
        await asyncio.sleep(60)
        raise AssertionError

    async def cancelled() -> None:
        task = asyncio.ensure_future(rollout(Verifiers(f"{HERE}.guess", 7), sample, TextRenderer(Letters())))
        await began.wait()
        assert tasks()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert not tasks()
    assert played(Verifiers(f"{HERE}.guess", 7), "1").ended == "turns"


def test_two_steps_of_training(model: Path, tmp_path: Path) -> None:
    guesses = {"fn": "rlprims.interop.verifiers.Verifiers", "options": {"max_turns": 2}}
    no_failures(trained(model, tmp_path, rows(f"{HERE}.guess", 4), guesses))
    (tmp_path / "shop").mkdir()
    metrics = trained(model, tmp_path / "shop", rows(f"{HERE}.shop", 2), "rlprims.interop.verifiers.Verifiers")
    no_failures(metrics)


PRICES = {"apple": 30, "pear": 45}
CLOSED = list[str]()


@as_tool
def price(item: str) -> int:
    """The price of a thing in cents."""
    return PRICES[item]


class Shopping:
    """Ours: a call costs 0.25, and the answer earns 1."""

    def __init__(self, question: str, answer: str = "") -> None:
        self.question, self.answer = question, answer

    def reset(self) -> FirstMessages:
        return [{"role": "user", "content": self.question}], [price]

    def step(self, message: Message) -> Step:
        if answers := answer_calls(message, [price]):
            return Step(answers, reward=-0.25)
        if message["content"] == "crash":
            raise RuntimeError("the till is stuck")
        if message["finish"] == "length":
            return Step([{"role": "user", "content": "shorter"}], reward=-0.5)
        right = message["content"] == self.answer
        return Step([{"role": "user", "content": "thanks"}], float(right), done=True, columns={"acc": right})

    def close(self) -> None:
        CLOSED.append(self.question)
        raise RuntimeError("the door sticks")


class Slow(Shopping):
    async def reset(self) -> FirstMessages:  # type: ignore[override]
        await asyncio.sleep(60)
        return []


def scripted(script: dict[str, list[Any]]) -> Any:
    """A client of theirs that answers by the first message and the number of the turn, and records what it read."""

    class Scripted(vf.Client):  # type: ignore[misc]
        def setup_client(self, config: Any) -> Any:
            raise NotImplementedError

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> Any:
            return list(messages), {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            self.client.append((prompt, tools))
            turn = sum(message.role == "assistant" for message in prompt)
            return script[prompt[0].content][turn]

        async def raise_from_native_response(self, response: Any) -> None:
            pass

        async def from_native_response(self, response: Any) -> Any:
            text, calls, cut = response if isinstance(response, tuple) else (response, None, False)
            message = vf.ResponseMessage(content=text, tool_calls=calls, finish_reason="stop", is_truncated=cut)
            return vf.Response(id="1", created=0, model="script", message=message)

        async def close(self) -> None:
            pass

    return Scripted([])


def generated(environment: Any, client: Any, **options: Any) -> list[Any]:
    results = environment.evaluate_sync(client=client, model="script", **options)
    return list(results["outputs"])


@pytest.fixture
def _handlers() -> Any:
    """Environments of verifiers set handlers where they are made in the main thread."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
def test_ours_within_theirs() -> None:
    CLOSED.clear()
    calls = [
        vf.ToolCall(id="a", name="price", arguments='{"item": "apple"}'),
        vf.ToolCall(id="b", name="price", arguments='{"item": '),
        vf.ToolCall(id="c", name="price", arguments='{"item": "pear"}'),
    ]
    script = {
        "Two apples?": [("", calls, False), ("It is now", None, True), "60"],
        "A pear?": ["50"],
        "Why?": ["crash"],
    }
    data = [{"question": "Two apples?", "answer": "60"}, {"question": "A pear?", "answer": "45"}, {"question": "Why?"}]
    client = scripted(script)
    environment = to_verifiers(Shopping, data, columns=["acc"])
    assert isinstance(environment, vf.MultiTurnEnv)
    apples, pear, why = generated(environment, client)
    assert (apples["reward"], pear["reward"], why["reward"]) == (0.25, 0.0, 0.0)
    assert apples["metrics"] == {"reward": 0.25, "acc": 1.0, "num_turns": 3.0}
    assert (pear["metrics"]["acc"], apples["error"], pear["error"]) == (0.0, None, None)
    assert "the till is stuck" in str(why["error"])
    assert why["stop_condition"] == "has_error"
    roles = [(each["role"], each["content"]) for each in apples["completion"]]
    assert roles[1][1] == "30"
    assert roles[2][1] == "45"
    assert "malformed call: arguments of 'price'" in roles[3][1]
    assert roles[4:] == [("assistant", "It is now"), ("user", "shorter"), ("assistant", "60"), ("user", "thanks")]
    assert [each.get("tool_call_id") for each in apples["completion"][1:4]] == ["a", "c", "b"]
    first = next(tools for prompt, tools in client.client if prompt[0].content == "Two apples?")
    assert [each.name for each in first] == ["price"]
    assert sorted(CLOSED) == ["A pear?", "Two apples?", "Why?"]


@pytest.mark.usefixtures("_handlers")
def test_ours_within_theirs_at_the_limits() -> None:
    call = [vf.ToolCall(id="a", name="price", arguments='{"item": "apple"}')]
    client = scripted({"Two apples?": [("", call, False)] * 9})
    data = [{"question": "Two apples?", "answer": "60"}]
    (output,) = generated(to_verifiers(Shopping, data, max_turns=2), client, rollouts_per_example=1)
    assert (output["reward"], output["stop_condition"]) == (-0.5, "max_turns_reached")  # the last one is answered too
    (slow,) = generated(to_verifiers(Slow, data, seconds=0.1), client)
    assert "longer than 0.1 s" in str(slow["error"])
    results = asyncio.run(
        to_verifiers(Shopping, data, eval_data=[{"question": "Two apples?", "answer": "?"}] * 3, max_turns=1).evaluate(
            client=client, model="script", state_columns=["trajectory"], independent_scoring=True
        )
    )
    assert [[step["reward"] for step in each["trajectory"]] for each in results["outputs"]] == [[-0.25]] * 3


@pytest.mark.usefixtures("_handlers")
def test_ours_within_theirs_played_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both directions at once: an episode has the score that the environment has without them."""
    from tests.bridges import verifiers_environments

    def twice() -> Any:
        return to_verifiers(Shopping, [{"question": "Two apples?", "answer": "60"}], columns=["acc"])

    monkeypatch.setattr(verifiers_environments, "twice", twice, raising=False)
    texts = ["<price>apple</price>", "60"]
    here, there = played(Shopping("Two apples?", "60"), *texts), played(Verifiers(f"{HERE}.twice", 0), *texts)
    assert here.score == there.score == 0.75
    assert there.columns["acc"] == 1.0
    assert contents(here)[:4] == contents(there) == ["Two apples?", "", "30", "60"]
    assert [turn.token_ids for turn in here.turns] == [turn.token_ids for turn in there.turns]
    assert EpisodeLimits().turns >= len(there.turns)
