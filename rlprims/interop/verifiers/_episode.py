"""An episode of an environment of verifiers."""

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any, Literal

from rlprims._event_loop import event_loop
from rlprims.environments import Message, Start, Step
from rlprims.interop.verifiers._package import loaded
from rlprims.interop.verifiers._rollout import Rollout


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
        self.rollout: Rollout | None = None

    async def reset(self) -> Start:
        environment, data = await asyncio.to_thread(loaded, self.name, self.split, self.options)
        if not 0 <= self.index < len(data):
            raise ValueError(f"{self.name}: expected an index below {len(data)}, its rows, got {self.index}")
        self.rollout = Rollout(self.name, environment, data[self.index])
        step = await in_loop(self.rollout.begin())
        if step.done:
            raise ValueError(f"{self.name}: row {self.index} ends before the model is asked; leave the row out")
        return step.messages, self.rollout.tools

    async def step(self, message: Message) -> Step:
        if self.rollout is None:
            raise RuntimeError("Verifiers.step came before reset: call reset first")
        answer: Step = await in_loop(self.rollout.answer(message))
        return answer

    async def close(self) -> None:
        """Cancel the rollout, and wait until it has cleaned up."""
        if self.rollout is not None:
            await in_loop(self.rollout.cancel())


def rows(name: str, count: int, *, split: Literal["train", "eval"] = "train") -> list[dict[str, Any]]:
    """Rows of the data, those of one environment.

    >>> rows("wordle", 2)
    [{'name': 'wordle', 'index': 0, 'split': 'train'}, {'name': 'wordle', 'index': 1, 'split': 'train'}]
    """
    return [{"name": name, "index": index, "split": split} for index in range(count)]


async def in_loop(work: Coroutine[Any, Any, Any]) -> Any:
    """Wait for what runs in the loop of these episodes. A rollout that blocks stops that loop and no other."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, event_loop("verifiers")))
