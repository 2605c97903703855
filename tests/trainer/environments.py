"""Environments that an untrained model can play, and ones that misbehave, named by import path in configs."""

import asyncio
import dataclasses
import os
import signal
import threading
from typing import Any

from rlprims.environments import Step
from tests.trainer.verifiers import has_a_digit


class OneTurn:
    """What the verifier scores, as an environment that is done after one step."""

    def __init__(self, question: str, answer: str) -> None:
        self.question, self.answer = question, answer

    def reset(self) -> Any:
        return [{"role": "user", "content": self.question}]

    def step(self, message: Any) -> Step:
        scored = has_a_digit(message["content"], self.answer)
        return Step(reward=scored["score"], done=True, columns={"acc": scored["acc"]})


class Digits(OneTurn):
    """Asks until there is a digit, right if it is the last letter; turns earn by length, first letters are states."""

    def __init__(self, question: str, answer: str, *, most: int = 4, names_states: bool = True) -> None:
        super().__init__(question, answer)
        self.left, self.names_states = most, names_states

    def step(self, message: Any) -> Step:
        self.left -= 1
        if has_a_digit(message["content"], self.answer)["acc"] or not self.left:
            right = message["content"][-1:] in "12345"
            return Step(reward=float(right), done=True, columns={"acc": right})
        state = {"state": message["content"][:1]} if self.names_states else {}
        ask = [{"role": "user", "content": "a" + message["content"][:2] + "?"}]
        return Step(ask, reward=len(message["content"]) / 16, columns=state)


class Sum(OneTurn):
    """Rows of two numbers instead of a question."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a}+{b}=", str(a + b))


class AsyncDigits(Digits):
    """The same, in another order of time."""

    async def step(self, message: Any) -> Step:  # type: ignore[override]
        await asyncio.sleep(0.001 * (len(message["content"]) % 4))
        return super().step(message)


class SlowDigits(Digits):
    """Answers after some of the trainer's steps."""

    async def step(self, message: Any) -> Step:  # type: ignore[override]
        await asyncio.sleep(0.2 * (len(message["content"]) % 4))
        return super().step(message)


class SaysMore(Digits):
    """Answers with another message."""

    def step(self, message: Any) -> Step:
        step = super().step(message)
        return dataclasses.replace(
            step, messages=[{**each, "content": each["content"] + "b"} for each in step.messages]
        )


class WithoutAcc(Digits):
    """Its rewards are all that it says."""

    def step(self, message: Any) -> Step:
        return dataclasses.replace(super().step(message), columns={})


class WithoutStep:
    """Can be reset, and nothing more."""

    def reset(self) -> Any:
        return []


class Broken(Digits):
    """Forgets to return something."""

    def step(self, message: Any) -> Any:
        return None


class Sick(Digits):
    """Fails on some questions, each in a way of its own."""

    def reset(self) -> Any:
        if self.question.startswith("0+1"):
            raise OSError("no such database")
        return super().reset()

    def step(self, message: Any) -> Any:
        match self.question[:3]:
            case "0+2":
                raise ValueError("cannot read this")
            case "0+3":
                return {"done": True}
            case "0+4":
                threading.Event().wait(60)
            case "0+5":
                return Step([{"role": "user", "content": "a" * 2**20}])
            case "0+6":
                return Step([{"role": "user", "content": "1"}])  # never done
            case "0+7":
                return Step(done=True, reward=float("nan"))
        return super().step(message)


class Killed(Digits):
    """Ends its process in the middle of an episode: at the step of the number KILL_AT, of all episodes."""

    steps = 0

    def step(self, message: Any) -> Step:
        Killed.steps += 1
        if str(Killed.steps) == os.environ.get("KILL_AT"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(message)
