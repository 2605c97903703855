"""A small environment of OpenEnv: guess the digit that is the seed."""

from typing import Any

from fastapi import FastAPI
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: str


class Hint(Observation):
    hint: str


class Digit(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self.digit, self.left = (seed or 0) % 10, 3
        return Hint(hint="a digit", done=False, reward=0.0)

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self.left -= 1
        right = action.guess.strip() == str(self.digit)
        return Hint(hint="" if right else "lower", done=right or not self.left, reward=float(right))

    @property
    def state(self) -> State:
        return State()


def app() -> FastAPI:
    return create_fastapi_app(Digit, Guess, Hint, max_concurrent_envs=64)
