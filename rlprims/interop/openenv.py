"""Environments that an OpenEnv server has: ``{fn: rlprims.interop.openenv.OpenEnv, url: http://...}``.

Tried with openenv-core 0.3.0, which is imported when the first episode begins. Each episode is a session of its own.
"""

import json
from collections.abc import Mapping
from typing import Any

from rlprims.environments import Message, Start, Step


class OpenEnv:
    """One session: a field of the observations is the user's message, and what the model writes a field of the action.

    Args:
        seed: of ``reset``; a row may have one.
        url: of the server.
        action: the field of the action that is the text.
        observation: the field of the observation that is read; empty: all of it, as JSON.
        prompt: what is written before the first observation.
    """

    def __init__(
        self, seed: int | None = None, *, url: str, action: str = "message", observation: str = "", prompt: str = ""
    ) -> None:
        self.seed, self.url, self.action, self.observation, self.prompt = seed, url, action, observation, prompt

    def reset(self) -> Start:
        try:
            from openenv.core.generic_client import GenericEnvClient
        except ImportError as error:
            raise ImportError(f"interop.openenv needs openenv-core ({error}): pip install openenv-core") from None
        self.client: Any = GenericEnvClient(base_url=self.url).sync()
        self.client.connect()
        result = self.client.reset(**({} if self.seed is None else {"seed": self.seed}))
        return [{"role": "user", "content": self.prompt + self._text(result.observation)}]

    def step(self, message: Message) -> Step:
        result = self.client.step({self.action: message["content"]})
        messages = [{"role": "user", "content": self._text(result.observation)}]
        return Step(messages, float(result.reward or 0.0), bool(result.done))

    def close(self) -> None:
        if hasattr(self, "client"):
            self.client.close()

    def _text(self, observation: Mapping[str, Any]) -> str:
        if not self.observation:
            return json.dumps(observation, ensure_ascii=False)
        if self.observation not in observation:
            raise ValueError(f"the observation has no {self.observation!r}, it has {sorted(observation)}: name one")
        return str(observation[self.observation])
