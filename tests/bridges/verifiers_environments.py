"""Environments of verifiers, as its users write them: a question, a number to guess, a shop, and some that go wrong."""

import asyncio
from typing import Any

import verifiers as vf
from datasets import Dataset

LIVE = set[str]()
"""Rollouts of Guess that were set up and not cleaned up."""
PRICES = {"apple": 30, "pear": 45}


def question() -> vf.Environment:
    def right(completion: Any, answer: str) -> float:
        return float(completion[-1].content.strip() == answer)

    def brief(completion: Any) -> float:
        return float(len(completion[-1].content) < 5)

    data = Dataset.from_dict({"question": ["2+2", "3+4"], "answer": ["4", "7"]})
    rubric = vf.Rubric(funcs=[right, brief], weights=[1.0, 0.5])
    return vf.SingleTurnEnv(dataset=data, system_prompt="Calculate.", rubric=rubric)


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state: Any) -> Any:
        LIVE.add(state["trajectory_id"])
        return state

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        guess = messages[-1].content.strip()
        if guess == "crash":
            raise RuntimeError("the die rolled away")
        if guess == "cancel":
            raise asyncio.CancelledError
        if guess == "give up":
            raise vf.InfraError("no die")
        if guess == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "yes"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"not {guess}"}]

    @vf.cleanup
    async def leave(self, state: Any) -> None:
        LIVE.discard(state["trajectory_id"])


def guess(timeout: float | None = None, max_turns: int = 3) -> vf.Environment:
    def found(state: Any) -> float:
        return 1.0 if state.get("final_env_response") else 0.0

    data = Dataset.from_dict({"question": [f"a digit, {i}" for i in range(10)], "answer": [str(i) for i in range(10)]})
    return Guess(dataset=data, rubric=vf.Rubric(funcs=[found]), max_turns=max_turns, timeout_seconds=timeout)


def shop() -> vf.Environment:
    def price(item: str) -> int:
        """The price of a thing in cents.

        Args:
            item: such as apple.
        """
        return PRICES[item]

    def right(completion: Any, answer: str) -> float:
        return float(answer in (completion[-1].content or ""))

    data = Dataset.from_dict({"question": ["Two apples cost?", "A pear costs?"], "answer": ["60", "45"]})
    return vf.ToolEnv(tools=[price], dataset=data, rubric=vf.Rubric(funcs=[right]), max_turns=4)


class Forgets(Guess):
    async def get_prompt_messages(self, state: Any) -> Any:
        return [{"role": "user", "content": f"turn {len(state['trajectory'])}"}]


def forgets() -> vf.Environment:
    data = Dataset.from_dict({"question": ["a digit"], "answer": ["3"]})
    return Forgets(dataset=data, rubric=vf.Rubric(funcs=[lambda state: 0.0]), max_turns=3)


def compares() -> vf.Environment:
    def best(completions: Any) -> list[float]:
        return [0.0 for _ in completions]

    data = Dataset.from_dict({"question": ["a digit"], "answer": ["3"]})
    return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[best]))


load_environment = question
"""By the name of this module, as installed environments have it."""
