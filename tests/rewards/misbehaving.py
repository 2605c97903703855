"""Verifiers that do what the response says: hang, die, or return nonsense. Named by import path in other processes."""

import ctypes
import itertools
import math
import os
import re
import signal
import sys
import time
from typing import Any

import numpy as np


class Alarm(BaseException):
    """As some libraries' timeouts are."""


def obey(response: str, answer: Any, *, bonus: float = 0.0) -> Any:
    match response:
        case "hang":
            time.sleep(1000)
        case "spin":
            while True:
                pass
        case "spin in C":
            return sum(itertools.repeat(1))
        case "backtrack":
            return float(re.match("(a+)+$", "a" * 40 + "b") is not None)
        case "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            ctypes.string_at(0)
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(0)
        case "fill":
            return float(len(bytearray(10**12)))
        case "raise":
            raise RuntimeError("cannot read this")
        case "alarm":
            raise Alarm("too late")
        case "ignore signals":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
    strange: dict[str, Any] = {
        "None": None,
        "nan": math.nan,
        "inf": math.inf,
        "text": "1.0",
        "list": [1.0],
        "no score": {"acc": 1.0},
        "numpy": np.float32(1.0),
        "bool": True,
        "pred": {"score": True, "pred": "72", "acc": np.bool_(True)},
    }
    return strange.get(response, float(response) + bonus if response.replace(".", "").isdigit() else 0.0)


def pid(response: str, answer: str) -> float:
    return os.getpid()


def child(response: str, answer: str) -> float:
    """Leaves a process behind and hangs; the response is where it writes the ids."""
    left = os.fork()
    if left == 0:
        time.sleep(1000)
    with open(response, "w") as file:
        file.write(f"{os.getpid()} {left}")
    time.sleep(1000)
    return 0.0


def sourced(response: str, answer: str, data_source: str) -> float:
    return float(len(data_source))


def slowly(response: str, answer: str) -> float:
    time.sleep(0.002)
    return float(response)


def columns(response: str, answer: Any, level: int = 9, missing: int = 0, **others: Any) -> float:
    return float(len(answer) + level + missing + len(others))
