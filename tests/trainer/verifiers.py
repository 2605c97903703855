"""Verifiers that an untrained model can please, and ones that misbehave; named by import path in the tests' configs."""

import asyncio
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def has_a_digit(response: str, answer: str) -> dict[str, float]:
    right = float(any(character in "12345" for character in response[:4]))
    return {"score": right, "acc": right}


def has_a_digit_slowly(response: str, answer: str) -> dict[str, float]:
    """Slow while the file exists that ``SLOW_WHILE`` names: a test has time to act upon a run before the run ends."""
    if (path := os.environ.get("SLOW_WHILE")) and Path(path).exists():
        time.sleep(0.3)
    return has_a_digit(response, answer)


def has_a_digit_behind_a_gate(response: str, answer: str) -> dict[str, float]:
    """Waits while the file exists that ``GATE`` names, and writes another beside it: the run is between two phases."""
    while (gate := Path(os.environ["GATE"])).exists():
        gate.with_suffix(".seen").touch()
        time.sleep(0.05)
    return has_a_digit(response, answer)


def a_digit_and_a_letter(response: str, answer: str) -> dict[str, float]:
    """The columns of the preset gdpo."""
    return {**has_a_digit(response, answer), "correct": float("1" in response), "format": float("a" in response)}


def one_number(response: str, answer: str) -> float:
    return has_a_digit(response, answer)["score"]


def a_digit_and_short(response: str, answer: str) -> dict[str, float]:
    return {**has_a_digit(response, answer), "short": float(len(response) < 6)}


def never_a_number(response: str, answer: str) -> float:
    return math.nan


def has_no_server(response: str, answer: str) -> float:
    raise ConnectionError("no server at localhost:8000")


def raises_on_some(response: str, answer: str) -> float:
    if response.startswith(("a", "b")):
        raise RuntimeError("cannot read this")
    return float(len(response) % 3)


def always_right(response: str, answer: str) -> dict[str, float]:
    return {"score": 1.0, "acc": 1.0}


def always_wrong(response: str, answer: str) -> dict[str, float]:
    return {"score": 0.0, "acc": 0.0}


def raises_or_hangs(response: str, answer: str) -> float:
    if response.startswith(("a", "b")):
        raise RuntimeError("cannot read this")
    while response.startswith(("c", "d")):
        pass
    return float(len(response) % 3)


async def brief(response: str, level: int = 2, missing: float = 0.0) -> dict[str, float]:
    await asyncio.sleep(0.001)
    return {"score": float(len(response) < level) + missing, "length": float(len(response))}


def rank(responses: list[str], answers: list[Any], **others: Any) -> list[float]:
    assert {"question", "prompt", "data_source", "level", "parts"} <= set(others)
    return [float(sorted(responses).index(response)) for response in responses]


def fails_on_a(response: str, answer: Any, *, also: str = "b") -> float | None:
    if response.startswith("a"):
        raise RuntimeError("cannot read this")
    return None if response.startswith(also) else 1.0


def of_parts(responses: list[str], answers: list[Any], parts: list[Any]) -> list[float]:
    return [float(len(answer["gold"]) + len(part)) for answer, part in zip(answers, parts, strict=True)]


def keep_nothing(scores: Tensor, group_ids: Tensor) -> Tensor:
    """A filter that is never content."""
    return torch.zeros_like(scores, dtype=torch.bool)


def of_the_question(response: str, answer: str) -> float:
    """All responses of a group have one score, which another group does not have."""
    return float(int(answer) % 3)


def fails_without_a_tag(response: str, answer: str) -> float:
    if "<answer>" not in response:
        raise ValueError("no answer")
    return has_a_digit(response, answer)["score"]
