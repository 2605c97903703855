"""A rollout of an environment of verifiers as a task that waits for the model's messages."""

import asyncio
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from rlprims.environments import Message, Step
from rlprims.interop.verifiers._messages import as_ours, as_theirs
from rlprims.interop.verifiers._package import package


class Request(NamedTuple):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    answer: "asyncio.Future[Any]"


class Rollout:
    """A rollout of the environment as a task. All methods run in the event loop of these episodes."""

    def __init__(self, name: str, environment: Any, row: Mapping[str, Any]) -> None:
        self.name, self.environment, self.row = name, environment, row
        self.tools, self.seen = list[dict[str, Any]](), list[dict[str, Any]]()
        self.news: asyncio.Queue[Request | None] = asyncio.Queue()

    async def begin(self) -> Step:
        client = client_class()(self.news)
        # verifiers scores a group of one by default, and this also works for a rubric without functions.
        run = self.environment.run_group([self.row], client, "policy", {})
        self.task: asyncio.Task[Any] = asyncio.ensure_future(run)
        self.task.add_done_callback(self._ended)
        return await self._next()

    async def answer(self, message: Message) -> Step:
        if not self.request.answer.done():  # it is done if the environment's time limit cancelled it
            response = as_theirs(message, len(self.seen))
            self.seen = [*self.seen, as_ours(response.message)]
            self.request.answer.set_result(response)
        return await self._next()

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled():
            task.exception()  # reading it avoids Python's warning about exceptions that are never retrieved
        self.news.put_nowait(None)

    async def _next(self) -> Step:
        """The messages of the environment's next call of the model, or the last step if it has ended."""
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
                f"{self.name} called the model with {len(request.messages)} messages that do not continue the {known} "
                "before, expected these unchanged and new ones; use an environment that keeps its history"
            )
        if not first and request.tools != self.tools:
            raise ValueError(f"{self.name} changed its tools within an episode: expected those of its first request")
        self.request, self.seen, self.tools = request, request.messages, request.tools
        return Step(request.messages[known:])

    def _last(self) -> Step:
        if self.task.cancelled():  # a CancelledError would end the whole run
            raise RuntimeError(f"{self.name} cancelled its own rollout")
        (output,) = self.task.result()
        if output.get("error"):
            raise RuntimeError(f"{self.name} ended with an error: {output['error']['error_chain_repr']}")
        if output.get("stop_condition") == "timeout_reached":
            raise TimeoutError(f"{self.name} reached its timeout_seconds, which include the model's time: raise it")
        columns = {name: float(value) for name, value in (output["metrics"] or {}).items()}
        return Step(reward=float(output["reward"]), done=True, columns=columns)


@cache
def client_class() -> Any:
    base: Any = package().Client

    class Client(base):  # type: ignore[misc]
        """Puts requests into a queue, and waits for their answers."""

        def setup_client(self, config: Any) -> Any:
            raise NotImplementedError("this client is made from a queue, not from a config")

        async def to_native_tool(self, tool: Any) -> dict[str, Any]:
            function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
            return {"type": "function", "function": function}

        async def to_native_prompt(self, messages: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            return [as_ours(message) for message in messages], {}

        async def get_native_response(
            self, prompt: list[dict[str, Any]], model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            request = Request(prompt, tools or [], asyncio.get_running_loop().create_future())
            self.client.put_nowait(request)
            return await request.answer

        async def raise_from_native_response(self, response: Any) -> None:
            pass

        async def from_native_response(self, response: Any) -> Any:
            return response

        async def close(self) -> None:
            pass

    return Client
