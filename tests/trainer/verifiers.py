"""Verifiers that an untrained model can please, and ones that misbehave; named by import path in the tests' configs."""

import math


def has_a_digit(response: str, answer: str) -> dict[str, float]:
    right = float(any(character in "12345" for character in response[:4]))
    return {"score": right, "acc": right}


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


def raises_or_hangs(response: str, answer: str) -> float:
    if response.startswith(("a", "b")):
        raise RuntimeError("cannot read this")
    while response.startswith(("c", "d")):
        pass
    return float(len(response) % 3)
