"""An environment of verifiers as an rlprims environment."""

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any, Literal

from rlprims._event_loop import event_loop
from rlprims.environments import FirstMessages, Message, Step
from rlprims.interop.verifiers._package import loaded
from rlprims.interop.verifiers._rollout import Rollout


class Verifiers:
    """One rollout of an environment of verifiers, scored by its rubric; the rubric's metrics are ``columns``.

    In verifiers the environment calls the model. Its rollout runs as a task of an event loop, which all of these
    episodes share. ``reset`` and ``step`` return when the environment calls the model again or has ended. The last step
    gets the reward. The environment object is made once for all episodes, as in verifiers.

    An episode fails if the environment raises or records an error, if its ``timeout_seconds`` pass, if it calls the
    model with a history that does not continue the conversation or with other tools, or if its rubric compares the
    rollouts of a group. A malformed call is dropped: the environment gets the rest of the message.

    Args:
        name: the argument of ``verifiers.load_environment``, or the import path of a function.
        index: the number of the row of its data.
        split: its training or evaluation data.
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
        self.rollout: Rollout | None = None

    async def reset(self) -> FirstMessages:
        environment, data = await asyncio.to_thread(loaded, self.name, self.split, self.options)
        if not 0 <= self.index < len(data):
            raise ValueError(f"{self.name}: expected an index below {len(data)}, its rows, got {self.index}")
        self.rollout = Rollout(self.name, environment, data[self.index])
        step = await in_loop(self.rollout.begin())
        if step.done:
            raise ValueError(f"{self.name}: row {self.index} ends before the model is called; leave the row out")
        return step.messages, self.rollout.tools

    async def step(self, message: Message) -> Step:
        if self.rollout is None:
            raise RuntimeError("Verifiers.step was called before reset: call reset first")
        answer: Step = await in_loop(self.rollout.answer(message))
        return answer

    async def close(self) -> None:
        """Cancel the rollout, and wait until it has cleaned up."""
        if self.rollout is not None:
            await in_loop(self.rollout.cancel())


def rows(name: str, count: int, *, split: Literal["train", "eval"] = "train") -> list[dict[str, Any]]:
    """Rows of data: the first ``count`` rows of an environment.

    >>> rows("wordle", 2)
    [{'name': 'wordle', 'index': 0, 'split': 'train'}, {'name': 'wordle', 'index': 1, 'split': 'train'}]
    """
    return [{"name": name, "index": index, "split": split} for index in range(count)]


async def in_loop(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in the event loop of these episodes and wait for it. A blocking rollout blocks only that loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, event_loop("verifiers")))
