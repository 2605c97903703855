"""Environments of an OpenEnv server: ``{fn: of_openenv.OpenEnv, url: http://...}``.

Tried with openenv-core 0.3.0, which is imported when the first episode begins. Each episode is a separate session.
"""

import json
from collections.abc import Mapping
from typing import Any

from rlprims.environments import FirstMessages, Message, Step


class OpenEnv:
    """One session: a field of the observation is the user's message, and the model's text is a field of the action.

    Args:
        seed: the seed of ``reset``; a row may have one.
        url: the address of the server.
        action: the field of the action for the model's text.
        observation: the field of the observation that becomes the message; empty: the whole observation, as JSON.
        prompt: text before the first observation.
    """

    def __init__(
        self, seed: int | None = None, *, url: str, action: str = "message", observation: str = "", prompt: str = ""
    ) -> None:
        self.seed, self.url, self.action, self.observation, self.prompt = seed, url, action, observation, prompt

    def reset(self) -> FirstMessages:
        from openenv.core.generic_client import GenericEnvClient

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
            raise ValueError(f"observation={self.observation!r}, expected one of its fields: {sorted(observation)}")
        return str(observation[self.observation])
