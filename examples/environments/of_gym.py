"""Environments of gymnasium and similar packages: ``environment: {fn: of_gym.Gym, package: gem}``.

A row names an environment and a seed, ``{"name": "game:GuessTheNumber-v0", "seed": 3}``. Tried with gem-llm 0.1.0 and
gymnasium 1.4.0; either is imported when the first episode begins.
"""

import importlib
import re
import threading
from typing import Any

from rlprims.environments import FirstMessages, Message, Step

_RESET = threading.Lock()
"""gem seeds the generators of the whole process."""


class Gym:
    """One episode: observations are messages of the user, and the text of the model is the action.

    For an action space of whole numbers (``Discrete``) the action is the last number in the message. A message without
    a number, or with a number that is not an action, ends the episode; ``columns`` then has ``no_action`` 1.

    Args:
        name: the argument of ``make``.
        seed: the seed of ``reset``.
        package: the package with ``make``.
        prompt: text before the first observation, for example a description of the actions.
    """

    def __init__(self, name: str, seed: int | None = None, *, package: str = "gymnasium", prompt: str = "") -> None:
        self.name, self.seed, self.package, self.prompt = name, seed, package, prompt

    def reset(self) -> FirstMessages:
        self.environment: Any = importlib.import_module(self.package).make(self.name)
        with _RESET:
            observation, _ = self.environment.reset(seed=self.seed)
        return [{"role": "user", "content": f"{self.prompt}{observation}"}]

    def step(self, message: Message) -> Step:
        action = self._action(message["content"])
        if action is None:
            return Step(done=True, columns={"no_action": 1.0})
        observation, reward, terminated, truncated, _ = self.environment.step(action)
        done = bool(terminated) or bool(truncated)
        return Step([{"role": "user", "content": f"{observation}"}], float(reward), done, {"no_action": 0.0})

    def close(self) -> None:
        close = getattr(getattr(self, "environment", None), "close", None)
        if callable(close):
            close()

    def _action(self, text: str) -> Any:
        space: Any = getattr(self.environment, "action_space", None)
        if not hasattr(space, "n"):
            return text
        numbers = re.findall(r"-?\d+", text)
        number = int(numbers[-1]) if numbers and len(numbers[-1]) < 10 else None
        return number if number is not None and space.contains(number) else None
