"""Environments of verifiers, ``environment: rlprims.interop.verifiers.Verifiers``, and ours within verifiers.

A row names an environment and a row of its data, ``{"name": "wordle", "index": 3}``: :func:`rows` makes them. Tried
with verifiers 0.3.1, 0.2.1 and 0.1.14, imported when the first episode begins. 0.4 has no environments that run in this
process: there an agent is a program of its own that calls the model over HTTP.
"""

import asyncio
import importlib
import json
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from rlprims._event_loop import event_loop
from rlprims.algorithms import import_path
from rlprims.environments import Environment, Message, Start, Step
from rlprims.environments._ask import Asker
from rlprims.environments._tools import schemas_of


class Verifiers:
    """One rollout of an environment of verifiers, scored by its own rubric, whose metrics are ``columns``.

    There the environment calls the model. Its rollout runs as a task of an event loop that all of these episodes share;
    ``reset`` and ``step`` return when it asks the model again or has ended. The reward is that of the last step. The
    environment itself is made once for all episodes, as verifiers does.

    An episode fails if the environment raises or records an error, if its own ``timeout_seconds`` pass, if it asks with
    a history that does not continue the conversation or with other tools, and if its rubric compares the rollouts of a
    group. A malformed call is no call: the environment reads the rest of the message.

    Args:
        name: as ``verifiers.load_environment`` takes it, or the import path of a function, ``package.module.function``.
        index: which row of its data.
        split: its data to train on or to evaluate on.
        options: arguments of ``load_environment``, or of the function.
    """

    def __init__(
        self,
        name: str,
        index: int,
        split: Literal["train", "eval"] = "train",
        *,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.index, self.split, self.options = name, index, split, json.dumps(options or {}, sort_keys=True)
        self.rollout: _Rollout | None = None

    async def reset(self) -> Start:
        environment, data = await asyncio.to_thread(_loaded, self.name, self.split, self.options)
        if not 0 <= self.index < len(data):
            raise ValueError(f"{self.name}: expected an index below {len(data)}, its rows, got {self.index}")
        self.rollout = _Rollout(self.name, environment, data[self.index])
        step = await _in_loop(self.rollout.begin())
        if step.done:
            raise ValueError(f"{self.name}: row {self.index} ends before the model is asked; leave the row out")
        return step.messages, self.rollout.tools

    async def step(self, message: Message) -> Step:
        if self.rollout is None:
            raise RuntimeError("Verifiers.step came before reset: call reset first")
        answer: Step = await _in_loop(self.rollout.answer(message))
        return answer

    async def close(self) -> None:
        """Cancel the rollout, and wait until it has cleaned up."""
        if self.rollout is not None:
            await _in_loop(self.rollout.cancel())


def rows(name: str, count: int, *, split: Literal["train", "eval"] = "train") -> list[dict[str, Any]]:
    """Rows of the data, those of one environment.

    >>> rows("wordle", 2)
    [{'name': 'wordle', 'index': 0, 'split': 'train'}, {'name': 'wordle', 'index': 1, 'split': 'train'}]
    """
    return [{"name": name, "index": index, "split": split} for index in range(count)]


def to_verifiers(
    make: Callable[..., Environment],
    data: Sequence[Mapping[str, Any]],
    *,
    eval_data: Sequence[Mapping[str, Any]] | None = None,
    columns: Sequence[str] = (),
    max_turns: int = 8,
    seconds: float = 60.0,
    **options: Any,
) -> Any:
    """A ``verifiers.MultiTurnEnv`` that plays an environment of ours; return it from a ``load_environment``.

    Its reward is the sum of the rewards of our steps; each is also the reward of its step of the trajectory. Every
    message is answered, the last one of ``max_turns`` too. An exception is the ``error`` of that rollout's state.

    Args:
        make: the class, called with the fields of a row.
        data: rows to train on.
        eval_data: rows to evaluate on; without them those of ``data``.
        columns: those that are metrics; 0 where an episode gave none.
        max_turns: messages that the model writes; -1: no limit.
        seconds: that the environment may take, over all calls of an episode.
        options: other arguments of ``MultiTurnEnv``.
    """
    vf = _verifiers()
    normalized = importlib.import_module("verifiers.utils.message_utils").normalize_messages

    @contextmanager
    def errors_of_theirs(what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # an error of theirs costs no more than the rollout
            reason = f"longer than {seconds} s" if isinstance(error, TimeoutError) and not str(error) else error
            raise vf.Error(f"{what}: {type(error).__name__}: {reason}") from error

    base: Any = vf.MultiTurnEnv

    class Ours(base):  # type: ignore[misc]
        async def setup_state(self, state: Any) -> Any:
            state["ask"], state["columns"] = Asker(seconds), {}
            with errors_of_theirs("reset"):
                state["environment"] = await state["ask"](lambda: make(**state["info"]))
                start = await state["ask"](state["environment"].reset)
                messages, tools = start if isinstance(start, tuple) else (start, ())
                state["prompt"] = normalized(list(messages))
                functions = [schema["function"] for schema in schemas_of(tools)]
                state["tool_defs"] = [vf.Tool(**{"description": "", **function}) for function in functions]
            return state

        async def add_trajectory_step(self, state: Any, trajectory_step: Any) -> None:
            # Here and not in env_response, which is not called after the last of max_turns.
            await super().add_trajectory_step(state, trajectory_step)
            written = trajectory_step["completion"][-1]
            message = _ours(written) | {"finish": "length" if trajectory_step["is_truncated"] else "stop"}
            with errors_of_theirs("step"):
                step: Step = await state["ask"](state["environment"].step, message)
                trajectory_step["reward"] = float(step.reward)
                state["columns"].update(step.columns)
                state["environment_answer"] = normalized(_with_call_ids(step.messages, written))
            if step.done:
                state["final_env_response"] = state["environment_answer"]

        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return state["environment_answer"]

        @vf.cleanup  # type: ignore[untyped-decorator]
        async def close_ours(self, state: Any) -> None:
            if "ask" not in state:  # cancelled before setup_state
                return
            close, ask = getattr(state.get("environment"), "close", None), state["ask"]
            try:
                if callable(close) and ask.left > 0:  # otherwise a call of it hangs
                    with suppress(Exception):  # the rollout is over and has its reward
                        await ask(close)
            finally:
                ask.close()

    def reward(state: Any) -> float:
        return math.fsum(step["reward"] or 0.0 for step in state["trajectory"])

    def metric(name: str) -> Callable[[Any], float]:
        def of_state(state: Any) -> float:
            return float(state["columns"].get(name, 0.0))

        of_state.__name__ = name
        return of_state

    rubric = vf.Rubric(funcs=[reward])
    for name in columns:
        rubric.add_metric(metric(name))
    return Ours(
        dataset=_data_set(data),
        eval_dataset=None if eval_data is None else _data_set(eval_data),
        rubric=rubric,
        max_turns=max_turns,
        **options,
    )


class _Request(NamedTuple):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    answer: "asyncio.Future[Any]"


class _Rollout:
    """A rollout of the environment's own, as a task; every method runs in the loop of these episodes."""

    def __init__(self, name: str, environment: Any, row: Mapping[str, Any]) -> None:
        self.name, self.environment, self.row = name, environment, row
        self.tools, self.seen = list[dict[str, Any]](), list[dict[str, Any]]()
        self.news: asyncio.Queue[_Request | None] = asyncio.Queue()

    async def begin(self) -> Step:
        client = _client_class()(self.news)
        # A group of one is what verifiers scores by default, and it bears a rubric without functions.
        run = self.environment.run_group([self.row], client, "policy", {})
        self.task: asyncio.Task[Any] = asyncio.ensure_future(run)
        self.task.add_done_callback(self._ended)
        return await self._next()

    async def answer(self, message: Message) -> Step:
        if not self.request.answer.done():  # cancelled, where the environment's own time is over
            response = _theirs(message, len(self.seen))
            self.seen = [*self.seen, _ours(response.message)]
            self.request.answer.set_result(response)
        return await self._next()

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled():
            task.exception()  # now it was read: Python warns of those that never are
        self.news.put_nowait(None)

    async def _next(self) -> Step:
        """What the environment asks next, or how it ended."""
        try:
            request = await self.news.get()
        except asyncio.CancelledError:
            self.task.cancel()
            raise
        if request is None:
            return self._last()
        first, known = not self.seen, len(self.seen)
        if request.messages[:known] != self.seen or len(request.messages) == known:
            raise ValueError(
                f"{self.name} asked with {len(request.messages)} messages that do not continue the {known} before: "
                "expected all of them unchanged, and new ones; take an environment that keeps its history"
            )
        if not first and request.tools != self.tools:
            raise ValueError(f"{self.name} changed its tools within an episode: expected those of its first request")
        self.request, self.seen, self.tools = request, request.messages, request.tools
        return Step(request.messages[known:])

    def _last(self) -> Step:
        if self.task.cancelled():  # as such the error would end the run
            raise RuntimeError(f"{self.name} cancelled its own rollout")
        (output,) = self.task.result()
        if output.get("error"):
            raise RuntimeError(f"{self.name} ended with an error: {output['error']['error_chain_repr']}")
        if output.get("stop_condition") == "timeout_reached":
            raise TimeoutError(f"{self.name}: its timeout_seconds passed, with the time of the model: raise them")
        columns = {name: float(value) for name, value in (output["metrics"] or {}).items()}
        return Step(reward=float(output["reward"]), done=True, columns=columns)


async def _in_loop(work: Coroutine[Any, Any, Any]) -> Any:
    """Wait for what runs in the loop of these episodes. A rollout that blocks stops that loop and no other."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, event_loop("verifiers")))


def _verifiers() -> Any:
    try:
        importlib.import_module("verifiers.envs.environment")  # which 0.4 has no more
        return importlib.import_module("verifiers")
    except ImportError as error:
        raise ImportError(
            f"interop.verifiers needs verifiers from 0.1.14 to 0.3.1 ({error}): pip install verifiers==0.3.1"
        ) from None


_LOADING = threading.Lock()


@cache
def _made(name: str, options: str) -> Any:
    vf = _verifiers()
    with _without_signal_handlers():
        if "." in name:
            made = import_path(name)(**json.loads(options))
        else:
            made = vf.load_environment(name, **json.loads(options))
    if not isinstance(made, vf.Environment):
        raise TypeError(f"{name}: expected an environment of verifiers, got {type(made).__name__}")
    if made.requires_group_rollouts:
        raise ValueError(f"the rubric of {name} compares the rollouts of a group, and here each is scored alone")
    return made


def _loaded(name: str, split: str, options: str) -> tuple[Any, Any]:
    """The environment and its data, made once in the process."""
    with _LOADING:
        made = _made(name, options)
        return made, made.get_dataset() if split == "train" else made.get_eval_dataset()


@contextmanager
def _without_signal_handlers() -> Iterator[None]:
    """Environments of verifiers set handlers of signals for the whole process when they are made.

    Python refuses that outside the main thread, where episodes begin; and the trainer's handlers must stay.
    """
    module: Any = importlib.import_module("verifiers.envs.environment")
    original = module.signal
    module.signal = SimpleNamespace(**{**vars(original), "signal": lambda *_: None})
    try:
        yield
    finally:
        module.signal = original


@cache
def _client_class() -> Any:
    base: Any = _verifiers().Client

    class Client(base):  # type: ignore[misc]
        """Puts requests into a queue, and waits for their answers."""

        def setup_client(self, config: Any) -> Any:
            raise NotImplementedError("this client is made from a queue, not from a config")

        async def to_native_tool(self, tool: Any) -> dict[str, Any]:
            function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
            return {"type": "function", "function": function}

        async def to_native_prompt(self, messages: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            return [_ours(message) for message in messages], {}

        async def get_native_response(
            self, prompt: list[dict[str, Any]], model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            request = _Request(prompt, tools or [], asyncio.get_running_loop().create_future())
            self.client.put_nowait(request)
            return await request.answer

        async def raise_from_native_response(self, response: Any) -> None:
            pass

        async def from_native_response(self, response: Any) -> Any:
            return response

        async def close(self) -> None:
            pass

    return Client


def _theirs(message: Message, number: int) -> Any:
    """The model's message as a response; ``number`` makes the ids of its calls unique."""
    vf = _verifiers()
    calls = [
        vf.ToolCall(
            id=f"call_{number}_{i}", name=call["function"]["name"], arguments=json.dumps(call["function"]["arguments"])
        )
        for i, call in enumerate(message.get("tool_calls", ()))
    ]
    cut = message.get("finish") == "length"
    written = vf.ResponseMessage(
        content=message["content"],
        tool_calls=calls or None,
        finish_reason="length" if cut else "tool_calls" if calls else "stop",
        is_truncated=cut,
    )
    return vf.Response(id=f"response_{number}", created=int(time.time()), model="policy", message=written)


def _ours(message: Any) -> dict[str, Any]:
    """A message of verifiers as chat templates take it, with the ids of its calls."""
    ours: dict[str, Any] = {
        "role": "user" if message.role == "text" else message.role,
        "content": _text(message.content),
    }
    if message.role == "tool":
        ours["tool_call_id"] = message.tool_call_id
    calls, malformed = list[dict[str, Any]](), list[str]()
    for call in getattr(message, "tool_calls", None) or ():
        try:
            arguments = json.loads(call.arguments)
        except ValueError as error:
            malformed.append(f"arguments of {call.name!r}: {error}")
            continue
        calls.append({"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments}})
    return ours | ({"tool_calls": calls} if calls else {}) | ({"malformed_calls": malformed} if malformed else {})


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, Mapping) else part.model_dump() for part in content]
    if kinds := sorted({str(part.get("type")) for part in parts} - {"text"}):
        raise ValueError(f"expected messages of text, got a part of type {kinds[0]!r}: images and sound are not read")
    return "".join(part["text"] for part in parts)


def _with_call_ids(messages: Sequence[Message], answered: Any) -> list[dict[str, Any]]:
    """Answers to calls come in the order of the calls, as ``answer_calls`` gives them; those malformed come last."""
    calls = _ours(answered).get("tool_calls", [])
    good = [call["id"] for call in calls]
    ids = iter([*good, *(call.id for call in answered.tool_calls or () if call.id not in good)])
    return [
        {"role": each["role"], "content": each["content"]}
        | ({"tool_call_id": next(ids, "")} if each["role"] == "tool" else {})
        for each in messages
    ]


def _data_set(data: Sequence[Mapping[str, Any]]) -> Any:
    """``reset`` gives the prompt; until then the fields of the row stand there. As text they need no common types."""
    texts = [json.dumps(dict(row), ensure_ascii=False) for row in data]
    made = [{"prompt": [{"role": "user", "content": text}], "info": text} for text in texts]
    return importlib.import_module("datasets").Dataset.from_list(made)
